"""Draws latency and bandwidth by message size, as SVG, from the output of `fishplate.sweep`
or `fishplate perf --json`:

    python -m fishplate.plot results.jsonl [more.jsonl] [-o results.svg]
"""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f"]
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 300, 70, 40, 110

Points = list[tuple[float, float]]


def read(lines: Iterable[str], name: str = "results") -> dict[str, tuple[Points, Points]]:
    """Reads JSON lines. Returns, by curve name, the latencies in us and the rates in GB/s."""
    curves: dict[str, tuple[Points, Points]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            size, rate = float(row["size"]), float(row["bytes_per_s"])
            p50 = row["lat_ns"].get("p50") if row.get("lat_ns") else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} line {number}: not a row of a sweep: {error!r}") from None
        latencies, rates = curves.setdefault(
            f"{row.get('test', '')} {row.get('transport', '')}", ([], [])
        )
        if size > 0 and rate > 0:
            rates.append((size, rate / 1e9))
        if size > 0 and p50:
            latencies.append((size, p50 / 1e3))
    if not curves:
        raise ValueError(f"{name}: no rows; name a file that the sweep wrote")
    return curves


def _bytes(size: float) -> str:
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:g}{unit}"
        size /= 1024
    return f"{size:g}G"


def _chart(left: float, title: str, curves: dict[str, Points]) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return []
    low_x, high_x = (math.log2(pick(x for x, _ in points)) for pick in (min, max))
    low_y, high_y = (math.floor(math.log10(min(y for _, y in points))),
                     math.ceil(math.log10(max(y for _, y in points))))
    high_x, high_y = max(high_x, low_x + 1), max(high_y, low_y + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return left + across * _WIDTH, _TOP + (1 - up) * _HEIGHT

    out = [f'<text x="{left + _WIDTH / 2}" y="24" text-anchor="middle">{html.escape(title)}</text>']
    for power in range(low_y, high_y + 1):
        _, y = place(2**low_x, 10.0**power)
        out.append(f'<path d="M{left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    step = max(1, round((high_x - low_x) / 7))
    for power in range(math.ceil(low_x), math.floor(high_x) + 1, step):
        x, _ = place(2.0**power, 10.0**low_y)
        out.append(
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">'
            f"{_bytes(2.0**power)}</text>"
        )
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(curve)))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + _HEIGHT + 40 + 16 * number
        out.append(f'<text x="{left}" y="{y}" fill="{colour}">{html.escape(name)}</text>')
    return out


def draw(curves: dict[str, tuple[Points, Points]]) -> str:
    """Returns the picture."""
    parts = _chart(
        _LEFT, "p50 latency (us) by size (bytes)", {name: both[0] for name, both in curves.items()}
    )
    right = _LEFT + _WIDTH + _GAP
    parts += _chart(
        right, "bandwidth, GB/s, by bytes", {name: both[1] for name, both in curves.items()}
    )
    width, height = right + _WIDTH + 30, _TOP + _HEIGHT + 50 + 16 * len(curves)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def main(words: list[str] | None = None) -> None:
    """Draws files."""
    parser = argparse.ArgumentParser(
        "python -m fishplate.plot", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, help="files of JSON lines")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the SVG file to write; default: the first file's name with .svg",
    )
    args = parser.parse_args(words)
    curves: dict[str, tuple[Points, Points]] = {}
    for path in args.results:
        prefix = f"{path.stem}: " if len(args.results) > 1 else ""
        try:
            found = read(path.read_text().splitlines(), str(path))
        except (OSError, ValueError) as error:
            raise SystemExit(f"fishplate.plot: {error}") from None
        curves |= {prefix + name: both for name, both in found.items()}
    output = args.output or args.results[0].with_suffix(".svg")
    output.write_text(draw(curves))
    print(output)


if __name__ == "__main__":
    main()
