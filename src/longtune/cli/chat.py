"""`longtune chat`: talks to a run's adapter, any adapter, or a model alone."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, Overrides, run

_HELP = "/base and /tuned switch the adapter off and on, /new starts over, /quit leaves"


def chat(
    target: Annotated[str, typer.Argument(help="A run folder, an adapter's folder, or a model.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="Answer this and leave; - reads it from stdin.")] = None,
    model: Annotated[str | None, typer.Option(help="The base model, if not the one the adapter names.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Answer without the adapter.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="With --prompt: answer without and with it.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the text as it is: no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Talk to TARGET, or ask it one thing with --prompt.

    \b
    longtune chat runs/rows
    longtune chat runs/rows --prompt "Hello" --compare
    """
    asked = _Asked(base, compare, plain, system, max_tokens, temperature)
    run(lambda: _chat(target, model, set_ or [], prompt, asked, as_json), as_json)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options."""

    base: bool
    compare: bool
    plain: bool
    system: str | None
    max_tokens: int
    temperature: float


def _chat(
    name: str, model: str | None, overrides: list[str], prompt: str | None, asked: _Asked, as_json: bool
) -> dict[str, Any]:
    from longtune.cli.options import find_target, readable
    from longtune.errors import Problem, UserError

    readable({"chat --prompt": prompt, "chat --system": asked.system})
    if prompt is None and (as_json or asked.compare):
        option = "--json" if as_json else "--compare"
        raise UserError(Problem(f"chat {option}", "needs something to ask", "add --prompt TEXT"))
    target = find_target(name, model=model, overrides=overrides)
    # Read before the model takes its time to load.
    text = _standard_input() if prompt == "-" else prompt

    from longtune.model.loading import load_model

    config = target.config
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        quantise=config.quantise_on_load,
    )
    speaker = _Speaker(loaded, target.adapter, config.chat_template_kwargs, asked)
    if text is None:
        _converse(speaker, tuned=not asked.base and target.adapter is not None)
        return {}
    result: dict[str, Any] = {"target": name, "model": config.model, "prompt": text}
    if asked.compare and target.adapter is not None:
        print("without the adapter:")
        result["base_answer"] = speaker.answer([text], tuned=False)
        result["base_cut_off"] = speaker.cut_off
        print("with the adapter:")
    result["answer"] = speaker.answer([text], tuned=not asked.base)
    result["cut_off"] = speaker.cut_off
    return result


def _standard_input() -> str:
    from longtune.cli.options import readable
    from longtune.errors import Problem, UserError

    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        reason = f"is no text in UTF-8 (at byte {error.start + 1:,})"
        raise UserError(Problem("stdin", reason, "convert it to UTF-8")) from None
    readable({"stdin": text})
    return text


class _Speaker:
    """A model that answers, with or without its adapter.

    Attributes:
        cut_off: whether the last answer reached the limit before its end.
    """

    def __init__(self, loaded: Any, adapter: Any, template_kwargs: dict[str, Any], asked: _Asked):
        from longtune.model.adapters import load_adapter

        self.tokenizer = loaded.tokenizer
        self.model = loaded.model if adapter is None else load_adapter(loaded.model, adapter)
        self.has_adapter = adapter is not None
        self.template_kwargs, self.asked = template_kwargs, asked
        self.cut_off = False

    def answer(self, turns: list[str], *, tuned: bool) -> str:
        """The answer to a conversation (user and assistant texts in turn, the user's last); printed as it comes."""
        from longtune.errors import counted
        from longtune.model.adapters import adapters_disabled
        from longtune.model.generation import generate

        off = self.has_adapter and not tuned
        cut: list[int] = []
        with adapters_disabled(self.model) if off else contextlib.nullcontext():
            (text,) = generate(
                self.model,
                self.tokenizer,
                [self._messages(turns)],
                max_new_tokens=self.asked.max_tokens,
                temperature=self.asked.temperature,
                batch_size=1,
                stream=_print_piece,
                cut_off=cut.append,
                template_kwargs=self.template_kwargs,
            )
        print(flush=True)
        self.cut_off = bool(cut)
        if cut:
            limit = counted(self.asked.max_tokens, "token")
            print(f"(cut off at {limit}: --max-tokens allows more)", file=sys.stderr, flush=True)
        return text

    def _messages(self, turns: list[str]) -> Any:
        system = self.asked.system
        if self.asked.plain or self.tokenizer.chat_template is None:
            return "\n".join([system, *turns] if system else turns)
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        return [{"role": "system", "content": system}, *messages] if system else messages


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _converse(speaker: _Speaker, *, tuned: bool) -> None:
    from longtune.errors import fault_of_text

    print(_HELP)
    turns: list[str] = []
    while True:
        try:
            text = input("tuned> " if tuned else "base> ").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            print("that is no text in UTF-8", file=sys.stderr)
            continue
        if fault := fault_of_text(text):
            print(f"that {fault}", file=sys.stderr)
            continue
        if text in ("/quit", "/exit"):
            return
        if text == "/new":
            turns = []
        elif text in ("/base", "/tuned"):
            tuned = text == "/tuned" and speaker.has_adapter
            turns = []
        elif text.startswith("/"):
            print(_HELP)
        elif text:
            turns += [text]
            turns += [speaker.answer(turns, tuned=tuned)]
