"""Card profiles: the shipped data is whole and plausible, a bad file says what is wrong where."""

from pathlib import Path

import pytest

from grpo_lite.cards import profile as profiles
from grpo_lite.cards.profile import (
    CardProfile,
    Figure,
    list_profiles,
    load_profile,
    match_profile,
    parse_profile,
    virtual_profile,
)
from grpo_lite.errors import UsageError
from grpo_lite.shipped import profiles_root
from grpo_lite.units import GIB, MIB

SHIPPED = sorted(file.name.removesuffix(".toml") for file in (profiles_root() / "cards").iterdir())


@pytest.fixture(autouse=True)
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an empty folder of the user's own profiles."""
    folder = tmp_path / "grpo-lite" / "cards"
    folder.mkdir(parents=True)
    monkeypatch.setattr(
        profiles.platformdirs, "user_config_path", lambda name: tmp_path / str(name)
    )
    return folder


def shipped_text(name: str) -> str:
    return (profiles_root() / "cards" / f"{name}.toml").read_text(encoding="utf-8")


def figures(profile: CardProfile) -> dict[str, Figure]:
    found = {key: getattr(profile, key) for key in profile.__slots__}
    found |= {f"flops_per_s.{dtype}": figure for dtype, figure in profile.flops_per_s.items()}
    return {key: value for key, value in found.items() if isinstance(value, Figure)}


def test_all_58_cards_are_shipped_and_listed() -> None:
    assert len(SHIPPED) == 58
    assert list_profiles() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_figure_names_its_source_and_evidence(name: str) -> None:
    """A guess shown as a fact is the error that this project exists to end."""
    profile = load_profile(name)
    assert profile.name == name
    assert len(figures(profile)) >= 10
    for key, figure in figures(profile).items():
        assert figure.source in ("measured", "datasheet", "estimated"), key
        assert figure.note, key


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_card_is_physically_plausible(name: str) -> None:
    """A slip of a unit (GB for GiB, Gbit for GB) moves a figure by 7 % or by a factor of 8."""
    profile = load_profile(name)
    driver_total = profile.driver_total_bytes
    assert driver_total is not None
    assert 0.92 * driver_total.value < profile.total_bytes.value < driver_total.value
    assert isinstance(profile.total_bytes.value, int)
    assert 100 * MIB < profile.runtime_bytes.value < GIB
    assert 8 * MIB < profile.cublas_workspace_bytes.value <= 32 * MIB
    assert profile.held_by_others_bytes.value < GIB
    assert 1e11 < profile.memory_bandwidth_bytes_per_s.value < 1e13
    rates = {dtype: figure.value for dtype, figure in profile.flops_per_s.items()}
    assert 5e12 < rates["float32"] < 2e14
    # the GTX 1080 Ti has neither tensor cores nor fast fp16; its two figures are the same rate
    assert rates["float16"] > 0.99 * rates["float32"]
    capability = float(profile.compute_capability or 0)
    assert profile.supports_bfloat16 == (capability >= 8)
    assert rates["bfloat16"] == rates["float16" if profile.supports_bfloat16 else "float32"]
    assert profile.link_bytes_per_s is not None
    assert 1.5e10 < profile.link_bytes_per_s.value < 6.4e10


def test_known_cards_have_their_known_bytes() -> None:
    laptop, tesla = load_profile("rtx-3080-laptop-16gb"), load_profile("t4-16gb")
    assert laptop.total_bytes.value == 15924 * MIB
    assert laptop.total_bytes.source == "estimated"
    assert laptop.total_bytes.high == 16110 * MIB
    assert laptop.runtime_bytes.value == 300 * MIB
    assert tesla.total_bytes.value == 14912 * MIB
    assert tesla.total_bytes.source == tesla.runtime_bytes.source == "measured"
    assert load_profile("h100-80gb").cublas_workspace_bytes.value == 32 * MIB
    assert load_profile("rtx-4090-24gb").cublas_workspace_bytes.value == 8_519_680


def test_an_unknown_card_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="rtx-3080-laptop-16gb") as caught:
        load_profile("rtx3080-laptop-16gb")
    assert caught.value.hint is not None
    assert "virtual:" in caught.value.hint


def test_a_name_with_a_path_in_it_reads_no_file_outside_the_profiles(users: Path) -> None:
    (users.parent / "outside.toml").write_text(shipped_text("t4-16gb"))
    with pytest.raises(UsageError, match="unknown card"):
        load_profile("../outside")


def test_the_users_file_comes_before_the_shipped_one_and_new_names_are_listed(users: Path) -> None:
    text = shipped_text("t4-16gb").replace('title = "Tesla T4"', 'title = "my T4"')
    (users / "t4-16gb.toml").write_text(text)
    (users / "rtx-9999.toml").write_text(text)
    assert load_profile("t4-16gb").title == "my T4"
    assert load_profile("rtx-9999").name == "rtx-9999"
    assert "rtx-9999" in list_profiles()
    assert len(list_profiles()) == 59


MINIMAL = """
title = "Card"
nvml_name = "Card"
form = "desktop"
arch = "New"
compute_capability = "8.6"
supports_bfloat16 = true
total_bytes = { value = 8_000_000_000, source = "measured", note = "seen" }
runtime_bytes = { value = 300_000_000, source = "estimated", note = "guess" }
cublas_workspace_bytes = { value = 8_519_680, source = "measured", note = "seen" }
held_by_others_bytes = { value = 0, source = "estimated", note = "no display" }
memory_bandwidth_bytes_per_s = { value = 1e11, source = "datasheet", note = "vendor" }
[flops_per_s]
bfloat16 = { value = 1e13, source = "datasheet", note = "vendor" }
float16 = { value = 1e13, source = "datasheet", note = "vendor" }
float32 = { value = 5e12, source = "datasheet", note = "vendor" }
"""


def test_a_file_with_only_the_needed_keys_is_enough() -> None:
    profile = parse_profile(MINIMAL, "here/my-card.toml")
    assert profile.name == "my-card"
    assert profile.link_bytes_per_s is None
    assert profile.total_bytes.value == 8_000_000_000


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('title = "Card"', "", ("title is missing", "text in quotes")),
        ('title = "Card"', "title = 3", ("title is 3", "text in quotes")),
        ("supports_bfloat16 = true", 'supports_bfloat16 = "yes"', ("supports_bfloat16", "true or")),
        ('"8.6"', '"sm_86"', ("compute_capability", "sm_86", "8.6")),
        ("runtime_bytes =", "runtime_byte =", ("runtime_byte'", "nearest known: runtime_bytes")),
        ("runtime_bytes = {", "runtime_bytes = 3 #", ("runtime_bytes is 3", "a table with value")),
        ("8_000_000_000", "8e9", ("total_bytes.value", "whole number of bytes")),
        ("8_000_000_000", "0", ("total_bytes.value is 0", "above 0")),
        ("8_000_000_000", '"8GB"', ("total_bytes.value is '8GB'", "a number of at least 0")),
        ("300_000_000", "-1", ("runtime_bytes.value is -1", "at least 0")),
        ("300_000_000", "true", ("runtime_bytes.value is True", "a number")),
        ("300_000_000", "5, low = 6", ("runtime_bytes.value 5 lies outside low 6",)),
        ("value = 1e11, ", "", ("memory_bandwidth_bytes_per_s.value is missing",)),
        ("1e11", "inf", ("memory_bandwidth_bytes_per_s.value is inf",)),
        ("1e11", "0", ("memory_bandwidth_bytes_per_s.value is 0", "above 0")),
        ('"measured", note = "seen" }\nrun', '"rumour", note = "" }\nrun', ("total_bytes.source",)),
        (', note = "guess"', "", ("runtime_bytes.note is missing",)),
        ('note = "guess"', 'note = "guess", typ = 3', ("runtime_bytes.typ",)),
        ("\nfloat16 =", "\nfp16 =", ("flops_per_s.fp16", "nearest known: flops_per_s.float16")),
        ("[flops_per_s]", "[flops]", ("unknown key 'flops'", "flops_per_s")),
        ("[flops_per_s]", "flops_per_s = 1\n[x]", ("unknown key 'x'",)),
        ('arch = "New"', "arch = ", ("not valid TOML", "line")),
    ],
)
def test_a_badly_edited_file_names_file_key_and_expectation(
    old: str, new: str, told: tuple[str, ...]
) -> None:
    """A user who edits a number must not be answered with a traceback, or worse, with nothing."""
    assert old in MINIMAL
    with pytest.raises(UsageError) as caught:
        parse_profile(MINIMAL.replace(old, new, 1), "here/my-card.toml")
    for part in ("here/my-card.toml", *told):
        assert part in str(caught.value)


def test_a_file_that_is_no_text_names_the_file(users: Path) -> None:
    (users / "odd.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"odd\.toml cannot be read"):
        load_profile("odd")


@pytest.mark.parametrize(
    ("nvml_name", "total_mib", "expected"),
    [
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16110, "rtx-3080-laptop-16gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 7812, "rtx-3080-laptop-8gb"),
        ("GeForce RTX 3080 Laptop GPU", 16384, "rtx-3080-laptop-16gb"),
        ("NVIDIA GeForce RTX 3080", 12117, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", 10009, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 15946, "rtx-4060-ti-16gb"),
        ("Tesla T4", 15110, "t4-16gb"),
        ("Tesla P100-PCIE-16GB", 16281, "p100-16gb"),
        ("NVIDIA RTX A6000", 45493, "rtx-a6000-48gb"),
    ],
)
def test_a_live_card_is_known_by_name_and_memory(
    nvml_name: str, total_mib: int, expected: str
) -> None:
    """Two 3080 laptops share a name; hosted machines share a card; ECC takes 7 % of an A6000."""
    profile = match_profile(nvml_name, total_mib * MIB)
    assert profile is not None
    assert profile.name == expected


def test_a_card_with_other_memory_or_capability_is_not_matched() -> None:
    """A 2080 Ti with 22 GB soldered on is not the 11 GB card; no other card's number stands in."""
    assert match_profile("NVIDIA GeForce RTX 2080 Ti", 22 * GIB) is None
    assert match_profile("NVIDIA GeForce RTX 2080 Ti", 11018 * MIB, "7.5") is not None
    assert match_profile("NVIDIA GeForce RTX 2080 Ti", 11018 * MIB, "8.6") is None
    assert match_profile("AMD Radeon", 16 * GIB) is None


def test_a_virtual_card_holds_nothing_and_says_that_its_speeds_are_assumed() -> None:
    profile = virtual_profile("virtual:3GiB", 3 * GIB)
    assert profile.total_bytes.value == 3 * GIB
    assert profile.runtime_bytes.value == profile.held_by_others_bytes.value == 0
    assert {figure.source for figure in figures(profile).values()} == {"assumed"}
    assert set(profile.flops_per_s) == {"bfloat16", "float16", "float32"}
