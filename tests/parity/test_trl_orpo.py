"""An ORPO step equals TRL's experimental ORPOTrainer: loss, metrics and every adapter gradient (fp32).

Under accumulation TRL averages the likelihood within each micro-batch, and then over micro-batches; longtune's is the
mean over the tokens of the step. The two are the same where all rows are equally long; elsewhere longtune is held to
the formula.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from longtune.objective import get
from tests import support
from tests.parity.trl_step import (
    LORA,
    SETTINGS,
    THEIR_WARNINGS,
    draw_adapter,
    our_step,
    pair_rows,
    tokenizer_of,
    trees_of,
    trl_step,
)
from tests.tiny_run import write_model

pytestmark = pytest.mark.filterwarnings(THEIR_WARNINGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tuned(folder):
    model = get_peft_model(base(folder), LoraConfig(**LORA))
    draw_adapter(model)
    return model


@pytest.mark.parametrize(
    ("batch", "accumulate", "equal"), [(1, 1, False), (3, 1, False), (1, 4, True), (3, 4, True)], ids=str
)
def test_a_step_equals_trls(folder, tmp_path, batch, accumulate, equal):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    tokenizer, rows = tokenizer_of(folder), pair_rows(batch * accumulate, equal=equal)
    arguments = ORPOConfig(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        beta=0.7,
        max_length=64,
        remove_unused_columns=False,
        **SETTINGS,
    )
    theirs, logs, _ = trl_step(ORPOTrainer, base(folder), rows, tokenizer, args=arguments)
    trees = trees_of(rows, tokenizer, tmp_path, method="orpo")
    assert all(len(tree.nodes) == 3 for tree in trees), "the prompt is shared"
    ours, metrics = our_step(tuned(folder), trees, get("orpo", weight=0.7), batch)
    assert support.worst(ours, theirs) < 1e-5
    expected = {
        "loss": logs["loss"],
        "nll": logs["nll_loss"],
        "odds": -logs["log_odds_ratio"],
        "margin": logs["log_odds_chosen"],
        "accuracy": logs["rewards/accuracies"],
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("scope", ["full", "response"])
def test_a_step_over_uneven_micro_batches_is_the_formula_over_all_its_rows(folder, tmp_path, scope):
    tokenizer, rows = tokenizer_of(folder), pair_rows(4)
    trees = trees_of(rows, tokenizer, tmp_path, method="orpo")
    ours, metrics = our_step(tuned(folder), trees, get("orpo", weight=0.7, sft_scope=scope), 1)
    model = tuned(folder)

    def log_probs(prompt, answer):
        """Of all next tokens, and of the answer's."""
        ids = torch.tensor(tokenizer(prompt + answer + "<eos>").input_ids)
        all_ = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None]).flatten()
        return all_, all_[len(tokenizer(prompt).input_ids) - 1 :]

    tokens, means, odds = [], [], []
    for row in rows:
        whole, chosen = log_probs(row["prompt"], row["chosen"])
        _, rejected = log_probs(row["prompt"], row["rejected"])
        c, r = chosen.mean(), rejected.mean()
        tokens.append(whole)
        means.append(c)
        odds.append(-logsigmoid((c - torch.log1p(-c.exp())) - (r - torch.log1p(-r.exp()))))
    nll = -torch.cat(tokens).mean() if scope == "full" else -torch.stack(means).mean()
    loss = nll + 0.7 * torch.stack(odds).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert support.worst(ours, support.gradients(model)) < 1e-5
