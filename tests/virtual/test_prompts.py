"""Prompts as token ids: templates, and prompts above the limit."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from grpo_lite.errors import UsageError
from grpo_lite.grpo.data import Example, Message
from grpo_lite.grpo.prompts import encode_prompts

WORDS = ["[UNK]", "[BOS]", "user", "assistant", "a", "b", "c", "d"]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('role') }}"
    "{% endif %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def tokenizer():
    """One id a word, in the order of WORDS; puts [BOS] before plain text, as Llama's does."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens(["[BOS]"])
    words.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="[BOS]", unk_token="[UNK]", chat_template=TEMPLATE
    )


def text(index, prompt):
    return Example(index=index, prompt=prompt, columns={})


def chat(index, content, role="user"):
    return text(index, (Message(role=role, content=content),))


def test_text_gets_the_special_tokens_and_a_chat_only_those_of_its_template(tokenizer):
    """A template writes its own first token; a second one shifts what the model was trained on."""
    encoded = encode_prompts(tokenizer, [text(0, "a b"), chat(1, "c")], 8)
    assert encoded.prompt_ids == ((1, 4, 5), (1, 2, 6, 3))
    assert encoded.num_overlong == 0
    assert encoded.longest_tokens == 4


def test_too_long_prompts_are_an_error_with_their_count_and_the_limit_that_covers_all(tokenizer):
    examples = [text(0, "a"), text(1, "a b c"), text(2, "a b c d")]
    with pytest.raises(
        UsageError, match=r"2 of 3 prompts are longer than 3 tokens; the longest has 5\n"
    ) as caught:
        encode_prompts(tokenizer, examples, 3)
    assert caught.value.hint == "--max-prompt-length 5 covers all"
    assert encode_prompts(tokenizer, examples, 5).examples == tuple(examples)


def test_too_long_prompts_can_be_dropped_or_lose_their_start(tokenizer):
    examples = [text(0, "a"), text(1, "a b c d"), text(2, "b")]
    dropped = encode_prompts(tokenizer, examples, 3, on_overlong="drop")
    assert [example.index for example in dropped.examples] == [0, 2]
    assert dropped.prompt_ids == ((1, 4), (1, 5))
    cut = encode_prompts(tokenizer, examples, 3, on_overlong="truncate_left")
    assert cut.examples == tuple(examples)
    assert cut.prompt_ids == ((1, 4), (5, 6, 7), (1, 5))
    assert dropped.num_overlong == cut.num_overlong == 1
    assert dropped.longest_tokens == cut.longest_tokens == 5


def test_dropping_every_prompt_is_an_error(tokenizer):
    with pytest.raises(UsageError, match="1 of 1 prompts are longer than 2"):
        encode_prompts(tokenizer, [text(0, "a b c")], 2, on_overlong="drop")


def test_a_chat_without_a_template_or_against_it_is_an_error(tokenizer):
    with pytest.raises(UsageError, match="template refuses prompt 7: role"):
        encode_prompts(tokenizer, [chat(7, "a", role="system")], 8)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="prompt 7 is a chat, and the tokenizer has no chat"):
        encode_prompts(tokenizer, [chat(7, "a")], 8)


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    """Sampling starts from the logits of the last prompt token: there would be none."""
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(UsageError, match="prompt 3 is empty"):
        encode_prompts(tokenizer, [chat(3, "a")], 8)


def test_an_unknown_way_with_long_prompts_is_refused(tokenizer):
    with pytest.raises(UsageError, match="on_overlong is 'cut'"):
        encode_prompts(tokenizer, [text(0, "a")], 8, on_overlong="cut")
