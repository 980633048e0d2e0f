"""A causal language model seen as prologue -> layers -> epilogue -> head, by asking the model itself.

The model's own decoder forward is run with each layer replaced by a stand-in that records its arguments and
returns its input: that is the prologue. Run again with the last stand-in returning the computed residual, it is the
epilogue. The model's own outer forward, run with the decoder replaced by one that returns given hidden states, is
the head. Nothing here knows a model family, and nothing is changed for longer than a call.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from longtune.errors import Problem, UserError
from longtune.model.members import modules_of, parameters_of
from longtune.model.rope import LengthDependentRope

Compiling = Literal["no", "size", "any size"]
"""Through `torch.compile`: not, for each size apart, or once for all sizes."""


_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
"""Held while a decoder is pointed at an engine's attention, by the thread that did so."""


@dataclass(slots=True)
class LayerCall:
    """The arguments that the model gave to one layer for one chunk, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_keyword: str | None = None


@dataclass(slots=True)
class Prologue:
    """What surrounds the layers for one chunk.

    Attributes:
        residual: input of the first layer; its shape is the model's own ([1, C, hidden]; Gemma 3n has one more axis).
        calls: arguments of each layer.
    """

    residual: torch.Tensor
    calls: list[LayerCall] = field(default_factory=list)


class _StandIn(nn.Module):
    """Takes a layer's place. Attributes of the layer (attention_type, ...) are those of the layer."""

    def __init__(self, layer: nn.Module, returns_tuple: bool):
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        self.returns_tuple = returns_tuple
        self.call: LayerCall | None = None
        self.hidden: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keyword = None
        if args:
            hidden, args = args[0], args[1:]
        else:
            keyword = "hidden_states"
            hidden = kwargs.pop(keyword)
        self.hidden = hidden
        self.call = LayerCall(args, kwargs, keyword)
        output = hidden if self.output is None else self.output
        return (output,) if self.returns_tuple else output


class HiddenOutput:
    """What a decoder returns, with hidden states [B, S, H] and nothing else: any other field is None."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _GivenHidden(nn.Module):
    """Takes the decoder's place and returns given hidden states."""

    def __init__(self, decoder: nn.Module, hidden: torch.Tensor):
        super().__init__()
        object.__setattr__(self, "_decoder", decoder)
        self.hidden = hidden
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_decoder"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.asked = True
        return HiddenOutput(self.hidden)


_LIST_NAMES = ("layers", "h", "blocks", "block", "decoder_layers")


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers causal LM inside a PEFT wrapper, or the model itself.

    Raises:
        UserError: the model is no causal LM of transformers.
    """
    inner = model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = cast(Any, inner).get_base_model()
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise UserError(
            Problem(
                type(model).__name__,
                "not a causal language model of transformers (no PreTrainedModel with an output head)",
                "load it with AutoModelForCausalLM",
            )
        )
    return inner


def find_layers(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.ModuleList, str, str]:
    """The decoder, its list of layers, and the names of both within the model ("model", "model.layers").

    The decoder is the innermost transformers model around the list.

    Raises:
        UserError: no list of `num_hidden_layers` modules is found.
    """
    count = model.config.get_text_config().num_hidden_layers
    modules = dict(model.named_modules())
    embedding = model.get_input_embeddings()
    found: list[tuple[PreTrainedModel, nn.ModuleList, str, str]] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList) or len(module) != count or name.rpartition(".")[2] not in _LIST_NAMES:
            continue
        parent = name.rpartition(".")[0]
        while parent and not isinstance(modules[parent], PreTrainedModel):
            parent = parent.rpartition(".")[0]
        if parent:
            found.append((cast(PreTrainedModel, modules[parent]), module, parent, name))
    if found:
        # An image encoder may have as many layers as the decoder, but embeds no tokens.
        return next((f for f in found if any(module is embedding for module in f[0].modules())), found[0])
    raise UserError(Problem(type(model).__name__, f"no list of {count} decoder layers was found inside a base model"))


class Stack:
    """The four parts of a causal LM.

    Args:
        model: a causal LM of transformers, PEFT-wrapped or not.

    Attributes:
        model: the transformers model inside.
        layers: the decoder layers.
        rope: rotary modules that must be told a row's length; usually there are none.
        returns_tuple: per layer, whether its forward returns a tuple; learnt by `probe`.
        shared: names of mapping arguments through which layers hand tensors to later layers, with placeholders for
            their entries (the engine's KV store holds the real ones); learnt by `probe`.
    """

    def __init__(self, model: nn.Module):
        self.model = unwrap(model)
        self.decoder, self._list, decoder_name, self.layers_name = find_layers(self.model)
        self._base_name = decoder_name.partition(".")[0]
        # Most models call their base; some (OPT) call the decoder inside it.
        self._head_places = list(dict.fromkeys((self._base_name, decoder_name)))
        self.layers: list[nn.Module] = list(self._list)
        self.returns_tuple = [False] * len(self.layers)
        self.shared: dict[str, dict[Any, Any]] = {}
        self._compiled_layers: dict[tuple[int, bool], Any] = {}
        self._configs = self._find_configs()
        self._checkpointing = [m for m in modules_of(self.decoder) if hasattr(m, "gradient_checkpointing")]
        self.rope = LengthDependentRope(self.decoder)
        self._decoder_forward = self.decoder.forward

    def _find_configs(self) -> list[Any]:
        configs = {}
        for module in modules_of(self.decoder):
            config = getattr(module, "config", None)
            if config is not None and hasattr(config, "_attn_implementation"):
                configs[id(config)] = config
        return list(configs.values())

    @property
    def head_module(self) -> nn.Module:
        """The model's output embeddings."""
        return cast(nn.Module, self.model.get_output_embeddings())

    @property
    def outer_parameters(self) -> list[nn.Parameter]:
        """Parameters of the decoder outside its layers, as they are now."""
        return parameters_of(*modules_of(self.decoder, without=self._list))

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """Parameters that come after the decoder, as they are now: all that lie outside the base, and the output
        embeddings (which may be those of the input)."""
        outside = modules_of(self.model, without=getattr(self.model, self._base_name))
        return parameters_of(*outside, *modules_of(self.head_module))

    @property
    def device(self) -> torch.device:
        # Of the layers themselves: while a prologue runs, perhaps in another thread, stand-ins are in their list.
        return next(p for layer in self.layers for p in layer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream: that of the embeddings."""
        embedding = cast(Any, self.model.get_input_embeddings())
        # What a packed embedding stores is no dtype to compute in.
        return getattr(embedding, "compute_dtype", embedding.weight.dtype)

    @contextmanager
    def attending(self, name: str) -> Iterator[None]:
        """Point the decoder's attention at the registered implementation `name`, with checkpointing off.

        Raises:
            RuntimeError: another thread is doing so with this model.
        """
        lock = _LOCKS.setdefault(self.decoder, threading.RLock())
        if not lock.acquire(blocking=False):
            raise RuntimeError(
                f"another thread is walking this {type(self.model).__name__}, which holds one walk at a time: let one"
                " thread take the steps, or give each thread a model of its own"
            )
        try:
            with self._attending(name):
                yield
        finally:
            lock.release()

    @contextmanager
    def _attending(self, name: str) -> Iterator[None]:
        before = [(config, config._attn_implementation) for config in self._configs]
        checkpointed = [m for m in self._checkpointing if cast(Any, m).gradient_checkpointing]
        try:
            for config, _ in before:
                config._attn_implementation = name
            for module in checkpointed:
                cast(Any, module).gradient_checkpointing = False
            yield
        finally:
            for config, old in before:
                config._attn_implementation = old
            for module in checkpointed:
                cast(Any, module).gradient_checkpointing = True

    @contextmanager
    def _stand_ins(self) -> Iterator[list[_StandIn]]:
        stand_ins = [_StandIn(layer, t) for layer, t in zip(self.layers, self.returns_tuple, strict=True)]
        try:
            for index, stand_in in enumerate(stand_ins):
                self._list[index] = stand_in
            yield stand_ins
        finally:
            for index, layer in enumerate(self.layers):
                self._list[index] = layer

    def run_decoder(self, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """The decoder's own forward on one sequence: last hidden states [1, T, H]."""
        # The forward that the decoder had when this view was made: it may have been given another one since.
        output = self._decoder_forward(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def prologue(self, tokens_C: torch.Tensor, positions_C: torch.Tensor) -> Prologue:
        """Input of the first layer and the arguments of every layer for a chunk of C tokens (int64, on the device)."""
        with self._stand_ins() as stand_ins:
            self.run_decoder(tokens_C, positions_C)
        residual = stand_ins[0].hidden
        calls = []
        for index, stand_in in enumerate(stand_ins):
            if stand_in.call is None or residual is None or not _same(stand_in.hidden, residual):
                raise UserError(
                    Problem(
                        type(self.model).__name__,
                        f"the model changes the residual stream before layer {index}, outside any layer",
                        "this architecture cannot be walked layer by layer",
                    )
                )
            calls.append(stand_in.call)
        assert residual is not None
        return Prologue(residual, calls)

    def epilogue(self, tokens_C: torch.Tensor, positions_C: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, C, hidden] that the head reads, from the output of the last layer."""
        with self._stand_ins() as stand_ins:
            stand_ins[-1].output = residual
            return self.run_decoder(tokens_C, positions_C)

    def layer(self, index: int, hidden: torch.Tensor, call: LayerCall, compiled: Compiling = "no") -> torch.Tensor:
        """Run one layer with recorded arguments, as it is or compiled (for each size of its arguments, or for all)."""
        run = self.layers[index] if compiled == "no" else self._compiled(index, compiled == "any size")
        kwargs = call.kwargs
        if self.shared:
            kwargs = dict(kwargs)
            for name, entries in self.shared.items():
                # The layer writes into a copy that dies with the call; what it would read is in the KV store.
                own = copy.copy(kwargs[name])
                own.update(entries)
                kwargs[name] = own
        if call.hidden_keyword is None:
            output = run(hidden, *call.args, **kwargs)
        else:
            output = run(*call.args, **{call.hidden_keyword: hidden}, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def _compiled(self, index: int, dynamic: bool) -> Any:
        """A layer through `torch.compile`; layers of one class share what was compiled."""
        key = index, dynamic
        if key not in self._compiled_layers:
            self._compiled_layers[key] = torch.compile(self.layers[index], dynamic=dynamic)
        return self._compiled_layers[key]

    def tensors(self, call: LayerCall) -> list[torch.Tensor]:
        """Tensor arguments of a call that carry gradients to the prologue's parameters."""
        leaves, _ = tree_flatten((call.args, {k: v for k, v in call.kwargs.items() if k not in self.shared}))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def with_tensors(self, call: LayerCall, tensors: list[torch.Tensor]) -> LayerCall:
        """The call with the tensors that `tensors(call)` lists replaced by others, in the same order."""
        plain = {k: v for k, v in call.kwargs.items() if k not in self.shared}
        leaves, spec = tree_flatten((call.args, plain))
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        return LayerCall(args, {**call.kwargs, **kwargs}, call.hidden_keyword)

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of hidden states [M, H], by the model's own outer forward (scaling and softcap included)."""
        dummy = torch.zeros(1, hidden_MH.shape[0], dtype=torch.int64, device=hidden_MH.device)
        while self._head_places:
            parent_name, _, name = self._head_places[0].rpartition(".")
            parent = self.model.get_submodule(parent_name)
            replaced = getattr(parent, name)
            stand_in = _GivenHidden(replaced, hidden_MH[None])
            try:
                setattr(parent, name, stand_in)
                output = type(self.model).forward(self.model, input_ids=dummy, use_cache=False)
            finally:
                setattr(parent, name, replaced)
            if stand_in.asked:
                return output.logits[0]
            # It went round the stand-in: these logits are of other hidden states.
            self._head_places.pop(0)
        raise UserError(
            Problem(
                type(self.model).__name__,
                "its head doesn't read the hidden states of its decoder",
                "this architecture is not supported",
            )
        )

    def learn_shared(self, calls: list[LayerCall], before: list[dict[str, int]]) -> None:
        """Note which mapping arguments the layers filled in a real forward, and keep placeholders of the entries."""
        for call, sizes in zip(calls, before, strict=True):
            for name, value in call.kwargs.items():
                if isinstance(value, MutableMapping) and len(value) > sizes.get(name, 0):
                    self.shared[name] = {
                        key: tuple(_placeholder(x) for x in entry) if isinstance(entry, tuple) else entry
                        for key, entry in value.items()
                    }


def _same(x: torch.Tensor | None, y: torch.Tensor) -> bool:
    """Whether two tensors are one (a model may slice the residual to its full length between layers)."""
    return x is not None and x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _placeholder(x: Any) -> Any:
    """A tensor of the same shape that takes no memory."""
    return x.new_zeros(()).expand(x.shape) if isinstance(x, torch.Tensor) else x


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode (dropout off); restored module by module."""
    training = [module for module in modules_of(model) if module.training]
    with ExitStack() as stack:
        for module in training:
            module.training = False
            stack.callback(setattr, module, "training", True)
        yield
