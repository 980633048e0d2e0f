"""Two threads at one model: the second one is told what is wrong, and the first one's step is none the worse."""

from __future__ import annotations

import threading

import pytest
import torch

from longtune.engine import Engine, Plan
from longtune.objective import get
from longtune.tree import Forest
from support import gradients, random_sequence, tiny_model, with_lora


@pytest.fixture
def model():
    return with_lora(tiny_model("llama"))


def step(engine):
    objective = get("sft")
    forest = Forest([random_sequence(19)])
    return engine.accumulate(forest, objective, objective.totals(forest))["loss"]


class Held:
    """A step in a thread of its own that stands still once `wait` is called there."""

    def __init__(self, engine):
        self.reached, self.released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(engine,))
        self.loss = None

    def _run(self, engine):
        self.loss = step(engine)

    def wait(self, *_):
        if threading.current_thread() is self._thread:
            self.reached.set()
            assert self.released.wait(30)

    def __enter__(self):
        self._thread.start()
        assert self.reached.wait(30)
        return self

    def __exit__(self, *_):
        self.released.set()
        self._thread.join(30)


@pytest.mark.parametrize("where", ["in the prologue", "in a layer", "between phases"])
@pytest.mark.parametrize("own_engine", [False, True])
def test_a_second_thread_is_told_what_is_wrong(model, where, own_engine):
    engine = Engine(model, Plan(chunk_tokens=7))
    other = Engine(model, Plan()) if own_engine else engine
    expected, wanted = step(engine), gradients(model)
    model.zero_grad()
    held = Held(engine)
    hooks = []
    if where == "between phases":
        engine.on_phase = held.wait
    else:
        at = model.get_input_embeddings() if where == "in the prologue" else engine.stack.layers[1]
        hooks.append(at.register_forward_pre_hook(held.wait))
    with held, pytest.raises(RuntimeError, match=r"another thread is walking this LlamaForCausalLM.*give each thread"):
        step(other)
    for hook in hooks:
        hook.remove()
    assert held.loss == expected
    assert all(torch.equal(wanted[name], found) for name, found in gradients(model).items())
    assert step(other) == pytest.approx(expected)


def test_threads_with_models_of_their_own_and_one_after_the_other_are_welcome(model):
    engine = Engine(model, Plan())
    expected = step(engine)
    held = Held(engine)
    engine.on_phase = held.wait
    with held:
        assert step(Engine(with_lora(tiny_model("llama")), Plan())) == expected
    assert held.loss == expected
