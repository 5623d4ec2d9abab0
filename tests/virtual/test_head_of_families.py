"""The output layer as read from real model families, and the refusal of what is not understood."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from grpo_lite.errors import UsageError
from grpo_lite.grpo.head import body_of, check_head, chunked_logprobs, head_of

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
# A transform that differs from the identity wherever the family has one.
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 30.0},
    "gemma3_text": {"final_logit_softcapping": 20.0},
    "smollm3": {},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
    "phi": {},  # a bias in the head
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": False},
    "gpt2": GPT2,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minicpm3": {"dim_model_base": 4, "num_key_value_heads": 2},  # scales the hidden states
    "falcon_h1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 2},
}


# peft 0.21 reads a name that transformers 5.24 has deprecated.
peft_filter = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


def make_model(model_type, **fields):
    torch.manual_seed(0)
    base = {} if model_type == "gpt2" else dict(SMALL)
    if model_type == "falcon":
        del base["head_dim"]
    config = transformers.AutoConfig.for_model(model_type, **{**base, **fields})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_head_of_a_family_is_its_own(model_type):
    """A forgotten softcap or scale trains on wrong log-probabilities and nothing complains."""
    model = make_model(model_type, **FAMILIES[model_type]).train()
    check_head(model)
    assert model.training
    ids = torch.tensor([[5, 9, 1, 30, 22, 7]])
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        logprobs, _ = chunked_logprobs(
            hidden, head_of(model), ids[0, 1:], temperature=0.8, chunk_tokens=2
        )
    dense = (logits / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "real", "assumed"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}, {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 8.0}, {"logits_scaling": 1.0}),
        ("llama", {}, {"final_logit_softcapping": 30.0}),
    ],
)
def test_a_transform_that_is_not_understood_is_refused(model_type, real, assumed):
    """Random weights have logits so small that a softcap hardly shows: the check must see it."""
    model = make_model(model_type, **real)
    plain_forward = model.forward
    truth = {name: getattr(model.config, name, None) for name in assumed}

    def forward(*args, **kwargs):
        for name, value in truth.items():
            setattr(model.config, name, value)
        try:
            return plain_forward(*args, **kwargs)
        finally:
            for name, value in assumed.items():
                setattr(model.config, name, value)

    model.forward = forward
    for name, value in assumed.items():
        setattr(model.config, name, value)
    with pytest.raises(UsageError, match=model_type):
        check_head(model)


def test_a_family_that_multiplies_where_others_divide_is_refused():
    """hyperclovax reads Granite's field the other way round: a factor of 64 in every logit."""
    model = make_model("hyperclovax", logits_scaling=8.0)
    with pytest.raises(UsageError, match="hyperclovax"):
        check_head(model)


def test_bf16_weights_pass_the_check():
    """Its tolerance must hold bf16's own rounding, or no real model could be trained."""
    check_head(make_model("gemma2", final_logit_softcapping=30.0).bfloat16())


@peft_filter
def test_adapters_in_the_body_leave_the_head_as_it_is():
    """peft wraps the model: the adapters must act in the body that the head reads."""
    model = get_peft_model(make_model("llama"), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    check_head(model)
    head = head_of(model)
    assert not head.weight_VH.requires_grad


@peft_filter
@pytest.mark.parametrize(
    "adapters",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_on_the_head_are_refused(adapters):
    """Reading only the base matrix of an adapted head would train it on what it does not say."""
    model = get_peft_model(make_model("llama"), LoraConfig(r=2, **adapters))
    with pytest.raises(UsageError, match="hint: leave lm_head out"):
        head_of(model)


def test_a_model_without_an_output_layer_is_refused():
    """An encoder or a bare body has no logits to train."""
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    with pytest.raises(UsageError, match="no output layer"):
        head_of(transformers.AutoModel.from_config(config))


def test_a_head_of_zeros_is_refused():
    """Nothing can be compared on it, and an unchecked head may be a wrong one."""
    model = make_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(UsageError, match="reach 0"):
        check_head(model)
