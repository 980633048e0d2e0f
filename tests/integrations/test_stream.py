"""`longtune.stream` as a user meets it: padding, packing, generation, trainers, mistakes, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

import longtune
from longtune import Plan, UserError
from tests import support


@pytest.fixture
def model():
    return support.with_lora(support.clean_llama())


def batch(rows: int = 2, columns: int = 14, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, columns), generator=torch.Generator().manual_seed(seed))


def backward(model, **inputs) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = support.gradients(model)
    model.zero_grad()
    return float(loss.detach()), found


def same(model, plan=None, tolerance=1e-6, **inputs) -> None:
    """The streamed loss and gradients are the plain ones (transformers' loss is fp32)."""
    truth_loss, truth = backward(model, **inputs, use_cache=False)
    with longtune.stream(model, plan=plan or Plan(chunk_tokens=5)):
        loss, found = backward(model, **inputs)
    assert loss == pytest.approx(truth_loss, rel=1e-6)
    assert support.worst(found, truth) < tolerance


def test_padding_on_either_side(model):
    ids = batch()
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 9:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    # transformers would have the last padding token predict the first real one.
    labels[0, 4] = -100
    same(model, input_ids=ids, attention_mask=mask, labels=labels)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    same(model, input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels)


def test_rows_packed_by_positions_do_not_see_each_other(model):
    one, two = batch(1, 6), batch(1, 8, seed=1)
    labels = torch.cat([one, two], 1)
    labels[0, 6] = -100
    positions = torch.cat([torch.arange(6), torch.arange(8)])[None]
    with longtune.stream(model, plan=Plan(chunk_tokens=4)):
        _, found = backward(model, input_ids=torch.cat([one, two], 1), position_ids=positions, labels=labels)
    model.zero_grad()
    loss = sum(model(input_ids=x, labels=x, num_items_in_batch=12, use_cache=False).loss for x in (one, two))
    loss.backward()
    assert support.worst(found, support.gradients(model)) < 1e-6


def test_trainers_counts_and_shifted_labels(model):
    ids = batch()
    same(model, input_ids=ids, labels=ids, num_items_in_batch=7)
    same(model, input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(7))
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    same(model, input_ids=ids, labels=ids, shift_labels=shifted)


def test_a_batch_without_labels_is_nan_as_in_transformers(model):
    ids = batch()
    labels = torch.full_like(ids, -100)
    assert model(input_ids=ids, labels=labels).loss.isnan()
    with longtune.stream(model):
        assert model(input_ids=ids, labels=labels).loss.isnan()


def test_evaluation_keeps_no_graph_and_generation_is_the_models_own(model):
    ids = batch(1, 6)
    with torch.no_grad():
        plain = model(input_ids=ids, labels=ids).loss
        written = model.generate(ids, max_new_tokens=5, do_sample=False)
    with longtune.stream(model, plan=Plan(chunk_tokens=2)), torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
        assert not loss.requires_grad and float(loss) == pytest.approx(float(plain), rel=1e-6)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), written)


def test_logits_when_asked_for(model):
    ids = batch()
    plain = model(input_ids=ids)
    with longtune.stream(model, plan=Plan(chunk_tokens=5)):
        assert model(input_ids=ids, labels=ids).logits is None
        kept = model(input_ids=ids, logits_to_keep=3).logits
        assert kept.shape[1] == 3 and torch.allclose(kept, plain.logits[:, -3:], atol=1e-10)


def test_autograd_grad_and_hooks_see_ordinary_gradients(model):
    ids = batch()
    parameters = [p for p in model.parameters() if p.requires_grad]
    truth = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, parameters)
    hooked = []
    parameters[0].register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.clone()))
    with longtune.stream(model):
        found = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, parameters)
        model(input_ids=ids, labels=ids).loss.backward()
    for ours, expected in zip((*found, hooked[0]), (*truth, truth[0]), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-8)
    assert len(hooked) == 1


def test_a_streamed_forward_is_walked_back_once(model):
    with longtune.stream(model):
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once"):
            loss.backward()


def test_autocast_is_that_of_the_forward():
    """Adapters keep their gradient under autocast, in the backward too, which runs outside of it."""
    model = support.with_lora(support.tiny_model("llama", torch.float32))
    ids = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    plain.backward()
    truth = support.gradients(model)
    model.zero_grad()
    with longtune.stream(model, plan=Plan(chunk_tokens=5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=2e-2)
    assert support.worst(support.gradients(model), truth) < 0.15


def test_dropout_follows_torch_manual_seed():
    model = support.with_lora(support.clean_llama(), dropout=0.4).train()
    found = []
    with longtune.stream(model, plan=Plan(chunk_tokens=5)) as handle:
        for seed, plan in ((1, Plan(chunk_tokens=5)), (1, Plan(chunk_tokens=5, keep="everything")), (2, None)):
            handle.plan = plan or handle.plan
            torch.manual_seed(seed)
            found.append(backward(model, input_ids=batch(), labels=batch())[1])
    assert support.worst(found[0], found[1]) < 1e-9 < 1e-2 < support.worst(found[0], found[2])


def test_closing_gives_the_model_back(model):
    inner = model.get_base_model()
    before = (vars(inner).get("forward"), vars(inner.model).get("forward"))
    handle = longtune.stream(model)
    with pytest.raises(UserError, match="streamed already"):
        longtune.stream(model)
    assert "forward" in vars(inner)
    handle.close()
    handle.close()
    assert (vars(inner).get("forward"), vars(inner.model).get("forward")) == before
    with longtune.stream(model):
        pass


def test_a_forward_wrapped_by_others_stays_and_passes_on(model):
    inner = model.get_base_model()
    handle = longtune.stream(model)
    ours = inner.forward
    inner.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.close()
    assert model(input_ids=batch(), labels=batch()).logits is not None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention_mask": torch.ones(2, 1, 14, 14)}, "4 axes"),
        ({"attention_mask": torch.tensor([[1] * 14, [1] * 5 + [0] * 3 + [1] * 6])}, "hole"),
        ({"attention_mask": torch.zeros(2, 14, dtype=torch.int64)}, "every token"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 14, 32)}, "inputs_embeds"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    ],
)
def test_what_cannot_be_streamed_is_refused(model, change, message):
    with longtune.stream(model), pytest.raises(UserError, match=message):
        model(**{"input_ids": batch(), "labels": batch(), **change})


def test_a_budget_plans_batches_and_changes_no_number(model):
    ids = batch()
    truth_loss, truth = backward(model, input_ids=ids, labels=ids, use_cache=False)
    with longtune.stream(model, memory="64GB") as handle:
        loss, found = backward(model, input_ids=ids, labels=ids)
        assert handle.plan.keep == "everything"
    assert loss == pytest.approx(truth_loss, rel=1e-6)
    assert support.worst(found, truth) < 1e-6


@pytest.mark.parametrize("store", ["host", "disk"])
def test_forwards_that_wait_for_one_backward_keep_what_is_theirs_when_the_plan_changes(model, store):
    short, long = batch()[:1, :5], batch()
    both = lambda: model(input_ids=short, labels=short).loss + model(input_ids=long, labels=long).loss  # noqa: E731
    model.zero_grad()
    both().backward()
    truth = support.gradients(model)
    model.zero_grad()
    plan = longtune.Plan(chunk_tokens=1, layers_per_segment=2, boundary_store=store)
    with longtune.stream(model, plan) as handle:
        first = model(input_ids=short, labels=short).loss
        handle.plan = longtune.Plan(chunk_tokens=3, boundary_store="device")
        (first + model(input_ids=long, labels=long).loss).backward()
        found = support.gradients(model)
        model.zero_grad()
    assert support.worst(found, truth) < 1e-6


def test_a_budget_that_nothing_fits_is_refused_by_the_forward(model):
    ids = batch()
    with longtune.stream(model, memory=10**6), pytest.raises(longtune.DoesNotFit, match="28 tokens"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(UserError, match="both given"):
        longtune.stream(model, plan=Plan(), memory="24GB")


def test_other_models_are_refused():
    with pytest.raises(UserError, match="causal language model"):
        longtune.stream(torch.nn.Linear(2, 2))


def test_hf_trainer_needs_no_change(tmp_path):
    def train(streamed: bool) -> list[float]:
        model = support.with_lora(support.tiny_model("llama", torch.float32))
        rows = [{"input_ids": row, "labels": row} for row in batch(8, 10)]
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        handle = longtune.stream(model, plan=Plan(chunk_tokens=4)) if streamed else None
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        if handle is not None:
            handle.close()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert train(True) == pytest.approx(train(False), rel=1e-4)


def test_parameters_changed_before_the_backward_are_refused_as_in_autograd(model):
    with longtune.stream(model):
        loss = model(input_ids=batch(), labels=batch()).loss
        with torch.no_grad():
            next(p for p in model.parameters() if p.requires_grad).add_(1.0)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


def test_gradients_arrive_under_saved_tensor_hooks(model):
    _, truth = backward(model, input_ids=batch(), labels=batch(), use_cache=False)
    with longtune.stream(model), torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        _, found = backward(model, input_ids=batch(), labels=batch())
    assert support.worst(found, truth) < 1e-6


def test_a_backward_in_another_mode_than_its_forward_is_refused():
    model = support.with_lora(support.clean_llama(), dropout=0.4).train()
    with longtune.stream(model):
        loss = model(input_ids=batch(), labels=batch()).loss
        model.eval()
        with pytest.raises(RuntimeError, match="evaluation mode"):
            loss.backward()
        model.train()
        loss.backward()


def test_a_handle_closed_before_the_backward_is_named(model):
    with longtune.stream(model):
        loss = model(input_ids=batch(), labels=batch()).loss
    with pytest.raises(RuntimeError, match="closed before the backward"):
        loss.backward()


def test_a_deep_copy_of_a_streamed_model_is_a_plain_one(model):
    with longtune.stream(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            next(p for p in twin.parameters() if p.requires_grad).mul_(3.0)
        loss, found = backward(twin, input_ids=batch(), labels=batch(), use_cache=False)
        assert all(p.grad is None for p in model.parameters())
        with longtune.stream(twin):
            again, streamed = backward(twin, input_ids=batch(), labels=batch())
    assert again == pytest.approx(loss, rel=1e-6) and support.worst(streamed, found) < 1e-6


def test_a_head_trained_frozen_or_replaced_later_is_noticed():
    model = support.clean_llama().requires_grad_(False)
    with longtune.stream(model) as handle:
        model.lm_head.requires_grad_(True)
        _, found = backward(model, input_ids=batch(), labels=batch())
        assert set(found) == {"lm_head.weight"}
        model.lm_head = torch.nn.Linear(32, 97, dtype=torch.float64).requires_grad_(False)
        model.model.requires_grad_(True)
        loss, found = backward(model, input_ids=batch(), labels=batch())
        handle.close()
    truth_loss, truth = backward(model, input_ids=batch(), labels=batch(), use_cache=False)
    assert loss == pytest.approx(truth_loss, rel=1e-6) and support.worst(found, truth) < 1e-6


def test_a_tuple_when_asked_for(model):
    ids = batch()
    with longtune.stream(model):
        (loss,) = model(input_ids=ids, labels=ids, return_dict=False)
        assert loss.item() == model(input_ids=ids, labels=ids).loss.item()
