"""Plots as SVG by hand, so that the same results give the same bytes on every machine."""

import math
import statistics

from results import FORMATS, cost

OURS, THEIRS, INK, GRID = "#1558b0", "#c2570c", "#222222", "#dddddd"
SHAPE_OF = {"bf16": "circle", "Q8_0": "square", "Q4_0": "triangle"}


class Svg:
    def __init__(self, width, height, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
                      f'font-family="sans-serif" font-size="13">', f"<title>{title}</title>",
                      f'<rect width="{width}" height="{height}" fill="#ffffff"/>']

    def text(self, x, y, text, anchor="start", color=INK, size=13, bold=False, turn=None):
        extra = ' font-weight="bold"' if bold else ""
        extra += f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        # A white edge keeps it legible over lines. Two texts: not every viewer knows paint-order.
        for paint in ('fill="#ffffff" stroke="#ffffff" stroke-width="3"', f'fill="{color}"'):
            self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {paint} font-size="{size}"{extra}>{text}</text>')

    def line(self, points, color=INK, width=1.0, dash=None):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{extra}/>')

    def area(self, points, color):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{color}" stroke="none"/>')

    def mark(self, x, y, kind, color, filled=True):
        style = f'fill="{color if filled else "#ffffff"}" stroke="{color}" stroke-width="1.8"'
        if kind == "circle":
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}/>')
        elif kind == "square":
            self.parts.append(f'<rect x="{x - 4.7:.1f}" y="{y - 4.7:.1f}" width="9.4" height="9.4" {style}/>')
        else:
            self.parts.append(f'<polygon points="{x:.1f},{y - 6:.1f} {x - 5.8:.1f},{y + 4.6:.1f} {x + 5.8:.1f},{y + 4.6:.1f}" {style}/>')

    def done(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


class Log:
    """A logarithmic axis from `low` to `high`, on `start` to `end` of the page."""

    def __init__(self, low, high, start, end):
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value):
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self):
        exponent = math.floor(math.log10(self.low))
        candidates = [m * 10 ** e for e in range(exponent, exponent + 8) for m in (1, 2, 5)]
        return [t for t in candidates if self.low <= t <= self.high * 1.0001]


def number(value):
    return f"{value:g}"


def frame(svg, x, y, x_label, y_label, x_ticks=None, y_ticks=None):
    for tick in x_ticks or x.ticks():
        svg.line([(x(tick), y.start), (x(tick), y.end)], GRID)
        svg.text(x(tick), y.start + 18, number(tick), "middle")
    for tick in y_ticks or y.ticks():
        svg.line([(x.start, y(tick)), (x.end, y(tick))], GRID)
        svg.text(x.start - 7, y(tick) + 4, number(tick), "end")
    svg.line([(x.start, y.end), (x.start, y.start), (x.end, y.start)], INK, 1.2)
    svg.text((x.start + x.end) / 2, y.start + 38, x_label, "middle")
    svg.text(x.start - 48, (y.start + y.end) / 2, y_label, "middle", turn=-90)


def legend(svg, x, y, with_limit=False):
    """One line."""
    for name, color, filled in (("Folio", OURS, True), ("llama.cpp", THEIRS, False)):
        svg.mark(x, y - 4, "circle", color, filled)
        svg.text(x + 10, y, name, color=color, bold=True)
        x += 30 + 8 * len(name)
    if with_limit:
        svg.line([(x, y - 4), (x + 26, y - 4)], INK, 1.2, "2 3")
        svg.text(x + 32, y, "limit by the rates measured in the same process")
    else:
        for name, kind in SHAPE_OF.items():
            svg.mark(x, y - 4, kind, INK, False)
            svg.text(x + 10, y, name)
            x += 30 + 8 * len(name)


def roofline(results, shape="llama-1b"):
    """Arithmetic against intensity, under the measured roofs."""
    points, reads, floats, ints = [], [], [], []
    for format_ in FORMATS:
        weight_bytes = results.median(shape, format_, "weight_bytes")
        for what in ("prefill 512", "decode x1 at 128", "decode x8 at 128", "decode x32 at 128"):
            cell = results.cells.get((shape, format_, what))
            if cell:
                size, work = cost(shape, weight_bytes, what)
                for rates, color, filled in ((cell.ours, OURS, True), (cell.theirs, THEIRS, False)):
                    points.append((2 * work / size, 2 * work * statistics.median(rates) / 1e9, format_, what, color, filled))
        for run in results.folio.get((shape, format_), []):
            reads.append(run["read_bytes_per_s"] / 1e9)
            floats.append(run["f32_flop_per_s"] / 1e9)
            if "int8_op_per_s" in run:
                ints.append(run["int8_op_per_s"] / 1e9)
    if not points:
        return None
    svg = Svg(900, 560, "Roofline")
    x, y = Log(0.6, 4000, 80, 870), Log(8, 2000, 490, 60)
    svg.text(80, 24, f"Roofline of the {shape} shape: where each figure lies under what the machine can do", bold=True, size=15)
    legend(svg, 86, 46)
    frame(svg, x, y, "operations per byte that must be read (a multiply-add is two)", "Gop/s")
    low, high = min(reads), max(reads)
    flop, op = statistics.median(floats), statistics.median(ints) if ints else None
    roof = op or flop
    # A band, because memory is of two kinds here: what one run reads at 36 GB/s another reads at 62.
    svg.area([(x(8 / low), y(8)), (x(roof / low), y(roof)), (x(roof / high), y(roof)), (x(max(0.6, 8 / high)), y(max(8, 0.6 * high))),
              (x(0.6), y(max(8, 0.6 * low)))], "#e4ecf7")
    for rate in (low, high):
        start = max(0.6, 8 / rate)
        svg.line([(x(start), y(rate * start)), (x(roof / rate), y(roof))], "#5b7fae", 1.4)
    svg.text(x(0.68), y(6.6 * high), f"weights read at {low:.0f} to {high:.0f} GB/s", color="#3d5f8c")
    for rate, name, at, anchor in ((flop, "f32 multiply-adds", x(flop / low) + 4, "start"), (op, "byte multiply-adds", x.end, "end")):
        if rate:
            svg.line([(x(rate / high), y(rate)), (x.end, y(rate))], INK, 1.6)
            svg.text(at, y(rate) - 6, f"{name}: {rate:.0f} Gop/s", anchor)
    for intensity, rate, format_, what, color, filled in points:
        svg.mark(x(intensity), y(rate), SHAPE_OF[format_], color, filled)
        # Both engines have the same intensity: names above Folio's and below the other's.
        name = what.split(" at ")[0].replace("decode ", "").replace(" 512", "")
        svg.text(x(intensity), y(rate) - 10 if filled else y(rate) + 19, name, "middle", color, 11)
    return svg.done()


def scaling(results, shape="llama-1b", depth=128):
    """Tokens per second against sequences decoding at once, one panel a format."""
    batches = [1, 8, 32]
    panels = []
    for format_ in FORMATS:
        cells = [results.cells.get((shape, format_, f"decode x{batch} at {depth}")) for batch in batches]
        if all(cells):
            panels.append((format_, cells))
    if not panels:
        return None
    svg = Svg(60 + 290 * len(panels), 400, "Batch scaling")
    svg.text(70, 24, f"Decoding {shape} at a depth of {depth}: all sequences together", bold=True, size=15)
    legend(svg, 76, 46, with_limit=True)
    rates = [rate for _, cells in panels for cell in cells for rate in cell.ours + cell.theirs + cell.limits]
    low, high = 0.6 * min(rates), 1.3 * max(rates)
    for index, (format_, cells) in enumerate(panels):
        left = 70 + 290 * index
        x, y = Log(0.8, 40, left, left + 235), Log(low, high, 335, 85)
        frame(svg, x, y, "sequences", "tokens/s" if index == 0 else "", batches)
        svg.text((x.start + x.end) / 2, 76, format_ if format_ != "bf16" else "bf16 (llama.cpp: f16)", "middle", bold=True)
        middle = lambda values: statistics.median(values)
        if all(cell.limits for cell in cells):
            svg.line([(x(b), y(middle(c.limits))) for b, c in zip(batches, cells)], INK, 1.2, "2 3")
        for name, color, filled, dash in (("ours", OURS, True, None), ("theirs", THEIRS, False, "6 4")):
            points = [(b, getattr(c, name)) for b, c in zip(batches, cells)]
            svg.line([(x(b), y(middle(r))) for b, r in points], color, 2, dash)
            for b, r in points:
                svg.line([(x(b), y(min(r))), (x(b), y(max(r)))], color, 1.2)
                svg.mark(x(b), y(middle(r)), SHAPE_OF[format_], color, filled)
                svg.text(x(b), y(max(r)) - 9 if filled else y(min(r)) + 19, f"{middle(r):.0f}", "middle", color, 12)
    return svg.done()
