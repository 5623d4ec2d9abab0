"""What is known of a card model: its bytes and speeds, each figure with its source.

Reads the TOML files that ship with grpo-lite and the user's own, which come first.
Knows no torch, no driver and no plan: what a live card really has free is `Budget`'s matter.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import Any

import platformdirs
import tomli_w

from grpo_lite.errors import StoreError, UsageError, unknown_name
from grpo_lite.shipped import profiles_root
from grpo_lite.units import format_bytes

SOURCES = ("measured", "datasheet", "estimated", "assumed")
"""Seen in outputs or logs; stated by the vendor; derived or recalled; chosen by grpo-lite."""
SPEED_DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes whose FLOP/s a profile states."""
CPU_NAME = "cpu"
"""The profile of this machine's processor as a card, made by `grpo-lite profile`."""
SAME_CARD_FRACTION = 0.1
"""How far a card's memory may lie from a profile's: ECC takes up to 7.5 % (RTX A6000)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number and where it comes from."""

    value: float
    """What plans use; bytes are whole numbers."""
    source: str
    """One of SOURCES."""
    note: str
    """The evidence in words."""
    low: float | None = None
    """Lowest value known; None where no range is known."""
    high: float | None = None
    """Highest value known; None where no range is known."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise UsageError(f"source is {self.source!r}; it must be one of {', '.join(SOURCES)}")
        for name, number in (("value", self.value), ("low", self.low), ("high", self.high)):
            if number is not None and not _is_number(number):
                raise UsageError(f"{name} is {number!r}; it must be a number of at least 0")
        low, high = self.low, self.high
        if (low is not None and low > self.value) or (high is not None and high < self.value):
            raise UsageError(f"value {self.value:g} lies outside low {low} .. high {high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProfile:
    """A card model as plans see it; the name is the file's."""

    name: str
    """What `--card` takes: "rtx-3080-laptop-16gb"."""
    title: str
    """The name for people."""
    nvml_name: str | None
    """What the driver calls the card; None for a byte budget on CPU tensors."""
    form: str
    """"laptop", "desktop", "workstation", "datacenter", "virtual", or "cpu": measured here."""
    arch: str
    """The vendor's name of the generation."""
    compute_capability: str | None
    """CUDA compute capability as "8.6"; None where there is no CUDA."""
    supports_bfloat16: bool
    """Whether the card computes in bfloat16; without, torch emulates it at float32 speed."""
    total_bytes: Figure
    """What torch sees of the card on Linux."""
    runtime_bytes: Figure
    """Held outside torch's allocator by one training process: context and loaded kernels."""
    cublas_workspace_bytes: Figure
    """Taken inside torch's allocator for each cuBLAS handle and stream."""
    held_by_others_bytes: Figure
    """Idle use by others on Linux: desktop, browser."""
    memory_bandwidth_bytes_per_s: Figure
    """Of the card's own memory."""
    flops_per_s: Mapping[str, Figure]
    """Dense rate by dtype (SPEED_DTYPES) with float32 accumulation."""
    launch_s: Figure | None = None
    """Seconds to start one operation from eager PyTorch."""
    link_bytes_per_s: Figure | None = None
    """From page-locked host memory to the card; None where both are one memory."""
    link_to_host_bytes_per_s: Figure | None = None
    """The other direction; None where it was not measured."""
    pageable_link_bytes_per_s: Figure | None = None
    """From ordinary host memory to the card."""
    pinnable_bytes: Figure | None = None
    """Host memory that could be page-locked; WSL2 and containers cap it."""
    driver_total_bytes: Figure | None = None
    """What nvidia-smi shows."""
    windows_total_bytes: Figure | None = None
    """What torch sees of the card on Windows and WSL."""
    windows_held_by_others_bytes: Figure | None = None
    """Not free at idle on Windows and WSL."""
    host_ram_bytes: Figure | None = None
    """RAM of the machine, where the profile is of one machine."""
    host_bandwidth_bytes_per_s: Figure | None = None
    """Bytes read and written by a copy in that RAM."""
    disk_write_bytes_per_s: Figure | None = None
    """Writing blocks of 128 MiB on the disk that offload would use."""
    disk_read_bytes_per_s: Figure | None = None
    """Reading them back."""
    tdp_w: Figure | None = None
    """Power limit in watts."""
    chip: str = ""
    """The vendor's name of the chip."""
    pcie: str = ""
    """Generation and lanes: "4.0 x8"."""
    same_card_as: str | None = None
    """The profile of the bare card, where this one is of a hosted machine with it."""
    notes: str = ""
    """What else to know, for people."""


def list_profiles() -> list[str]:
    """Return the names of all profiles, shipped and the user's, in order."""
    return sorted(_profile_files())


def load_profile(name: str) -> CardProfile:
    """Return the profile called `name`: the user's file of that name first, else the shipped one.

    Raises:
        UsageError: no profile has that name (the nearest are listed), or its file cannot be used.
    """
    files = _profile_files()
    if name not in files:
        raise unknown_name(
            "card", name, files, hint="--card virtual:8GiB plans for any byte budget"
        )
    return _read(files[name])


def match_profile(
    nvml_name: str, total_bytes: int, compute_capability: str | None = None
) -> CardProfile | None:
    """Return the profile of the card that calls itself `nvml_name`; None if there is none.

    Cards that share a name are told apart by memory: the profile nearest to `total_bytes` is
    taken, and none further away than SAME_CARD_FRACTION (a card with other memory is another card).
    """
    near: list[tuple[float, CardProfile]] = []
    for file in _profile_files().values():
        profile = _read(file)
        if profile.nvml_name is None or profile.same_card_as is not None:
            continue
        if compute_capability not in (None, profile.compute_capability):
            continue
        if _plain_name(profile.nvml_name) == _plain_name(nvml_name):
            near.append((_memory_distance_fraction(profile, total_bytes), profile))
    distance, best = min(near, key=lambda row: row[0], default=(math.inf, None))
    return best if distance <= SAME_CARD_FRACTION else None


def virtual_profile(name: str, total_bytes: int) -> CardProfile:
    """Return the profile of a card that is a budget of `total_bytes` on CPU tensors.

    Its speeds are round figures of a small CPU, so that plans can be put in order.
    """

    def assumed(value: float, note: str) -> Figure:
        return Figure(value=value, source="assumed", note=note)

    ranks = "a round figure of two CPU cores; it ranks plans, it predicts no time"
    none_held = "a byte budget on CPU tensors: nothing is held beside the tensors"
    return CardProfile(
        name=name,
        title=f"virtual card of {format_bytes(total_bytes)}",
        nvml_name=None,
        form="virtual",
        arch="CPU",
        compute_capability=None,
        supports_bfloat16=True,
        total_bytes=assumed(total_bytes, "the budget that was asked for"),
        runtime_bytes=assumed(0, none_held),
        cublas_workspace_bytes=assumed(0, none_held),
        held_by_others_bytes=assumed(0, none_held),
        memory_bandwidth_bytes_per_s=assumed(2e10, ranks),
        flops_per_s={dtype: assumed(1e11, ranks) for dtype in SPEED_DTYPES},
    )


def parse_profile(text: str, origin: str) -> CardProfile:
    """Return the profile written in `text`, the TOML content of the file `origin`.

    Raises:
        UsageError: with the file, the key and what was expected.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not valid TOML: {error}") from error
    reader = _Reader(table=table, origin=origin)
    reader.require_known(table, _READERS)
    needed = {f.name for f in fields(CardProfile) if f.default is MISSING} - {"name"}
    if table.get("form") == "cpu":
        needed -= {"nvml_name", "compute_capability"}
    wanted = [key for key in _READERS if key in table or key in needed]
    values: dict[str, Any] = {
        **dict.fromkeys(("nvml_name", "compute_capability")),
        **{key: _READERS[key](reader, key) for key in wanted},
    }
    capability = values["compute_capability"]
    if capability is not None and not re.fullmatch(r"\d+\.\d+", capability):
        raise reader.wrong("compute_capability", capability, 'text such as "8.6"')
    return CardProfile(name=PurePath(origin).stem, **values)


def profile_to_toml(profile: CardProfile) -> str:
    """Return `profile` as the text that `parse_profile` reads."""
    table = {key: value for key, value in asdict(profile).items() if key != "name"}
    return tomli_w.dumps(_without_none(table))


def save_profile(profile: CardProfile) -> Path:
    """Write `profile` to the user's profiles, whole or not at all; return its file.

    Raises:
        StoreError: the folder cannot be written.
    """
    file = user_profiles() / f"{profile.name}.toml"
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(profile_to_toml(profile), encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise StoreError(f"{file} cannot be written: {error.strerror}") from error
    return file


def user_profiles() -> Path:
    """Return the folder of the user's own profiles."""
    return Path(platformdirs.user_config_path("grpo-lite")) / "cards"


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    table: Mapping[str, Any]
    origin: str

    def wrong(self, key: str, got: object, expected: str) -> UsageError:
        shown = "missing" if got is None else repr(got)
        return UsageError(f"{self.origin}: {key} is {shown}; expected {expected}")

    def require_known(
        self, table: Mapping[str, Any], known: Iterable[str], *, prefix: str = ""
    ) -> None:
        names = list(known)
        for key in table:
            if key not in names:
                error = unknown_name("key", f"{prefix}{key}", [prefix + name for name in names])
                raise UsageError(f"{self.origin}: {error.message}")

    def text(self, key: str) -> str:
        value = self.table.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, value, "text in quotes")
        return value

    def flag(self, key: str) -> bool:
        value = self.table.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def amount(self, key: str) -> Figure:
        figure = self._figure(self.table.get(key), key)
        for name in ("value", "low", "high"):
            number = getattr(figure, name)
            if number is not None and not isinstance(number, int):
                raise self.wrong(f"{key}.{name}", number, "a whole number of bytes")
        return figure

    def total(self, key: str) -> Figure:
        figure = self.amount(key)
        if figure.value == 0:
            raise self.wrong(f"{key}.value", 0, "a whole number of bytes above 0")
        return figure

    def rate(self, key: str) -> Figure:
        return self._rate(self.table.get(key), key)

    def rates(self, key: str) -> dict[str, Figure]:
        value = self.table.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table with {', '.join(SPEED_DTYPES)}")
        self.require_known(value, SPEED_DTYPES, prefix=f"{key}.")
        return {dtype: self._rate(value.get(dtype), f"{key}.{dtype}") for dtype in SPEED_DTYPES}

    def _rate(self, value: object, key: str) -> Figure:
        figure = self._figure(value, key)
        if figure.value == 0:
            raise self.wrong(f"{key}.value", figure.value, "a number above 0")
        return figure

    def _figure(self, value: object, key: str) -> Figure:
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table with value, source and note")
        self.require_known(value, [f.name for f in fields(Figure)], prefix=f"{key}.")
        for name in ("source", "note"):
            if not isinstance(value.get(name), str):
                raise self.wrong(f"{key}.{name}", value.get(name), "text in quotes")
        if "value" not in value:
            raise self.wrong(f"{key}.value", None, "a number of at least 0")
        try:
            return Figure(**value)
        except UsageError as error:
            raise UsageError(f"{self.origin}: {key}.{error.message}") from error


_READERS: dict[str, Callable[[_Reader, str], object]] = {
    "title": _Reader.text,
    "nvml_name": _Reader.text,
    "form": _Reader.text,
    "arch": _Reader.text,
    "chip": _Reader.text,
    "pcie": _Reader.text,
    "notes": _Reader.text,
    "same_card_as": _Reader.text,
    "compute_capability": _Reader.text,
    "supports_bfloat16": _Reader.flag,
    "total_bytes": _Reader.total,
    "driver_total_bytes": _Reader.total,
    "windows_total_bytes": _Reader.total,
    "runtime_bytes": _Reader.amount,
    "cublas_workspace_bytes": _Reader.amount,
    "held_by_others_bytes": _Reader.amount,
    "windows_held_by_others_bytes": _Reader.amount,
    "host_ram_bytes": _Reader.amount,
    "memory_bandwidth_bytes_per_s": _Reader.rate,
    "host_bandwidth_bytes_per_s": _Reader.rate,
    "disk_write_bytes_per_s": _Reader.rate,
    "disk_read_bytes_per_s": _Reader.rate,
    "link_bytes_per_s": _Reader.rate,
    "link_to_host_bytes_per_s": _Reader.rate,
    "pageable_link_bytes_per_s": _Reader.rate,
    "pinnable_bytes": _Reader.amount,
    "launch_s": _Reader.rate,
    "tdp_w": _Reader.rate,
    "flops_per_s": _Reader.rates,
}
"""How each key of a profile's file is read."""


def _profile_files() -> dict[str, Traversable]:
    """Return the profile files by name; the user's replace the shipped ones."""
    folders: list[Traversable] = [profiles_root() / "cards"]
    if user_profiles().is_dir():
        folders.append(user_profiles())
    return {
        PurePath(file.name).stem: file
        for folder in folders
        for file in folder.iterdir()
        if PurePath(file.name).suffix == ".toml"
    }


def _read(file: Traversable) -> CardProfile:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return parse_profile(text, str(file))


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < math.inf


def _plain_name(nvml_name: str) -> str:
    """Return the name without the vendor's, which older drivers leave out."""
    return nvml_name.casefold().removeprefix("nvidia ").strip()


def _memory_distance_fraction(profile: CardProfile, total_bytes: int) -> float:
    """Return how far `total_bytes` lies from the nearest total of `profile`, as a share of it."""
    totals = (profile.total_bytes, profile.driver_total_bytes)
    return min(abs(total_bytes / f.value - 1) for f in totals if f is not None and f.value > 0)
