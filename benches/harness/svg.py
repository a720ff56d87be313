"""What the pictures are drawn with: elements of SVG as text."""

# Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = ["#000000", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#999999"]


def text(x, y, words, anchor="middle", size=13, fill="#333", extra=""):
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{extra}>{words}</text>'


def path(points, colour, width, dash=""):
    """A line, written as steps from point to point to keep the file small."""
    x, y = (round(v, 1) for v in points[0])
    d = [f"M{x:g} {y:g}l"]
    for px, py in points[1:]:
        dx, dy = round(px - x, 1), round(py - y, 1)
        x, y = round(x + dx, 1), round(y + dy, 1)
        d.append(f"{dx:g},{dy:g} ")
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{"".join(d).strip()}" fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"{dash}/>'


def panel(left, right, top, bottom, title, ticks, y_of):
    """Frame, title and horizontal grid: `ticks` are values with their labels, `y_of` places a value."""
    yield text(left, top - 10, title, "start", 14, "#111", ' font-weight="600"')
    for value, label in ticks:
        y = y_of(value)
        yield f'<path d="M{left} {y:g}H{right}" stroke="#e3e3e3"/>'
        yield text(left - 8, y + 4.5, label, "end")
    yield f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#888"/>'


def power_of_ten(power):
    return f'10<tspan dy="-5" font-size="9">{"−" if power < 0 else ""}{abs(power)}</tspan>'
