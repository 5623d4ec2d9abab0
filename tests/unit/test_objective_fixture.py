"""The sixteen cells that TRL 1.16's own loss gave for a fixed batch: value and gradient norm."""

import pytest
import torch

from grpo_lite.grpo.objective import LossInputs, Normalizers, ObjectiveSettings, objective

# TRL's numbers are those of one micro-batch of 4 rows and 13 tokens, with accumulation 2:
#   grpo, dr_grpo  mean over 4 rows, then / 2        -> an update of 8 rows
#   bnpo           / 13 tokens, then / 2             -> an update of 26 tokens (both micro-batches
#                                                       alike, as bnpo takes them to be)
#   dapo           / num_items_in_batch 30 x 2 / 2   -> an update of 30 tokens
NORMALIZERS = {
    "grpo": Normalizers(num_rows=8, num_loss_tokens=30),
    "bnpo": Normalizers(num_rows=8, num_loss_tokens=26),
    "dr_grpo": Normalizers(num_rows=8, num_loss_tokens=30),
    "dapo": Normalizers(num_rows=8, num_loss_tokens=30),
}
COLUMNS = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "plain KL": {"beta": 0.04, "use_bias_correction_kl": False},
    "corrected KL": {"beta": 0.04},
}
# Loss and L2 norm of d loss / d logprobs, by loss type, in the order of COLUMNS.
CELLS = {
    "grpo": (
        (0.0178054, 0.1195821),
        (0.0178262, 0.1227303),
        (0.0178292, 0.1194112),
        (0.0178307, 0.1194033),
    ),
    "bnpo": (
        (-0.1304021, 0.0861082),
        (-0.1296078, 0.0963900),
        (-0.1303719, 0.0859142),
        (-0.1303705, 0.0859216),
    ),
    "dr_grpo": (
        (-0.0529758, 0.0349815),
        (-0.0526532, 0.0391584),
        (-0.0529636, 0.0349027),
        (-0.0529630, 0.0349056),
    ),
    "dapo": (
        (-0.1130151, 0.0746271),
        (-0.1123268, 0.0835380),
        (-0.1129889, 0.0744590),
        (-0.1129878, 0.0744654),
    ),
}


def fixture_inputs() -> LossInputs:
    row = torch.arange(4, dtype=torch.float64)[:, None]
    token = torch.arange(5, dtype=torch.float64)[None]
    logprobs = -(0.10 + 0.05 * row + 0.07 * token)
    sign = (-1.0) ** (row + token)
    return LossInputs(
        logprobs_BT=logprobs.clone().requires_grad_(),
        old_logprobs_BT=logprobs + 0.09 * sign * (1 + token),
        ref_logprobs_BT=logprobs - 0.02 * (token + 1) * (-1.0) ** row,
        advantages_B=torch.tensor([1, -0.5, 0.25, -0.75], dtype=torch.float64),
        mask_BT=token < torch.tensor([5, 3, 4, 1])[:, None],
    )


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("loss_type", CELLS)
def test_loss_and_gradient_are_those_that_trl_measured(loss_type, column):
    """A wrong sign, clip, KL or normaliser still trains, only worse: numbers must pin it."""
    settings = ObjectiveSettings(
        loss_type=loss_type, epsilon_high=0.28, max_completion_length=8, **COLUMNS[column]
    )
    inputs = fixture_inputs()
    share = objective(inputs, settings, NORMALIZERS[loss_type])
    share.loss.backward()
    loss, norm = CELLS[loss_type][list(COLUMNS).index(column)]
    assert share.loss.item() == pytest.approx(loss, abs=1e-7, rel=1e-6)
    assert inputs.logprobs_BT.grad.norm().item() == pytest.approx(norm, abs=1e-7, rel=1e-6)
