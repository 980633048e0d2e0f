"""`longtune quantise`: a plain model as a quantised one, more bits where the measured sensitivities ask for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from longtune.cli.output import AsJson, run


def quantise(
    model: Annotated[str, typer.Argument(help="A folder, a hub name, or smollm2.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    bits: Annotated[int, typer.Option(help="Width of most modules.")] = 4,
    high_bits: Annotated[str | None, typer.Option(help="Widths of sensitive ones; 5, 6 and 8 by default.")] = None,
    target_bpw: Annotated[float, typer.Option(min=0.0, help="Bits per weight of the whole model, at most.")] = 5.0,
    group_size: Annotated[int, typer.Option(min=1, help="Numbers that share a scale.")] = 64,
    sensitivity: Annotated[Path | None, typer.Option(help="Figures; the default is the model's own.")] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="The same width everywhere, without figures.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Of scales and plain weights; the model's own by default.")] = None,
    trust: Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write MODEL with packed weights, which mlx-lm loads, too.

    \b
    longtune sensitivity smollm2 --data rows.jsonl --out kl.json
    longtune quantise smollm2 --sensitivity kl.json --target-bpw 5 --out 5bit

    Scales count: 4 bits in groups of 64 are 4.5 bits per weight.
    """
    run(
        lambda: _quantise(
            model, out, bits, high_bits, target_bpw, group_size, sensitivity, uniform, dtype, trust_remote_code=trust
        ),
        as_json,
    )


def _quantise(
    name: str,
    out: Path,
    bits: int,
    high_bits: str | None,
    target: float,
    group_size: int,
    sensitivity: Path | None,
    uniform: bool,
    dtype: str | None,
    *,
    trust_remote_code: bool,
) -> dict[str, Any]:
    from longtune.cli.sensitivity import affine_formats, bar, print_left
    from longtune.errors import Problem, UserError
    from longtune.quantise.writing import check_free

    low = affine_formats(str(bits), group_size)[0]
    wider = ",".join(str(width) for width in (5, 6, 8) if width > low.bits)
    higher = affine_formats(high_bits or wider or "8", group_size, "--high-bits")
    if not uniform and higher[0].bits <= low.bits:
        raise UserError(Problem("--high-bits", f"{higher[0].bits} is not above --bits {low.bits}", "or use --uniform"))
    if uniform and sensitivity is not None:
        raise UserError(Problem("--uniform", "uses no sensitivities", "leave out one of the two"))
    check_free(out)

    from longtune.model.loading import load_model, own_dtype
    from longtune.quantise import choose_widths, find_units, uniform_widths, write_checkpoint
    from longtune.quantise.figures import figures_for
    from longtune.quantise.writing import plain_size

    loaded = load_model(name, dtype=dtype or own_dtype(name), device="cpu", trust_remote_code=trust_remote_code)
    units, left = find_units(loaded.model, group_size)
    print_left(left)
    plain, scale_bits = plain_size(loaded.model, units), 8 * loaded.model.dtype.itemsize
    kl: dict[str, dict[int, float]] = {}
    if uniform:
        widths = uniform_widths(units, low, plain, scale_bits)
    else:
        kl = figures_for([unit.name for unit in units], loaded.path, sensitivity)
        widths = choose_widths(units, [low, *higher], target, kl, plain, scale_bits)
    for note in widths.notes:
        print(note)
    about = {
        "model": name,
        "bits": low.bits,
        "high_bits": None if uniform else [format.bits for format in higher],
        "target_bits_per_weight": None if uniform else target,
        "group_size": group_size,
    }
    source = loaded.path if loaded.path is not None and loaded.path.is_dir() else None
    with bar("packing", len(units)) as step:
        write_checkpoint(
            out,
            loaded.model,
            loaded.tokenizer,
            units,
            widths,
            source=source,
            kl=kl,
            about=about,
            on_unit=lambda unit: step(unit.name),
        )
    raised = sum(format.bits > low.bits for format in widths.formats.values())
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    counts = Counter(format.bits for format in widths.formats.values())
    shown = f"{len(units)} modules, " + ", ".join(f"{counts[width]} at {width} bits" for width in sorted(counts))
    print(f"{shown}, {widths.bits_per_weight:.3f} bits per weight, {size / 1e6:,.1f} MB")
    print(f"wrote {out}")
    return {
        "model": name,
        "out": str(out),
        "bits_per_weight": widths.bits_per_weight,
        "bytes": size,
        "modules": len(units),
        "high": raised,
        "left": left,
        "bits": {name: format.bits for name, format in widths.formats.items()},
    }
