"""Boxes and words at places: written as SVG by ourselves, as PNG by matplotlib."""

import importlib.util
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from lightning_pipeline.errors import ConfigurationError

_CHARACTER = 0.56  # widths of a digit and of most letters of a sans-serif font, in font sizes
_ASCENT = 0.36  # half the height of a digit, in font sizes


class Box(NamedTuple):
    """A filled rectangle. Lengths are pixels, from the upper left corner.

    Args:
        x: Left edge.
        y: Upper edge.
        width: To the right.
        height: Downwards.
        fill: Colour, as `#rrggbb`.
        edge: Colour of a thin line around; none when empty.
        hint: Shown over the box by a browser.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    hint: str = ""


class Words(NamedTuple):
    """A line of text.

    Args:
        x: Of its start, middle or end.
        y: Of the middle of its height.
        text: What it says.
        size: Of the font, in pixels.
        anchor: What `x` is of: `start`, `middle` or `end`.
        bold: Whether in bold.
    """

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True)
class Picture:
    """What is drawn, in order.

    Attributes:
        width: In pixels.
        height: In pixels.
        title: For readers of the file and of the page.
        shapes: Later ones lie on top.
    """

    width: float
    height: float
    title: str
    shapes: Sequence[Box | Words]

    def svg(self) -> str:
        """The text of an SVG file."""
        width, height = math.ceil(self.width), math.ceil(self.height)
        size = f'width="{width}" height="{height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect {size} fill="#ffffff"/>',
        ]
        parts += [_svg_box(shape) if isinstance(shape, Box) else _svg_words(shape) for shape in self.shapes]
        return "\n".join([*parts, "</svg>\n"])

    def png(self, scale: float = 2.0) -> bytes:
        """The bytes of a PNG file.

        Args:
            scale: Dots per pixel.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        file = io.BytesIO()
        self._plot(scale).print_png(file)
        return file.getvalue()

    def pixels(self, scale: float = 1.0) -> Any:
        """A buffer of bytes: height, width, then red, green, blue and opacity.

        Args:
            scale: Dots per pixel.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        canvas = self._plot(scale)
        canvas.draw()
        return canvas.buffer_rgba()

    def _plot(self, scale: float) -> Any:
        require_plot()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / 100, self.height / 100), dpi=100 * scale, facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for shape in self.shapes:
            if isinstance(shape, Box):
                _plot_box(axes, shape)
            else:
                _plot_words(axes, shape)
        return FigureCanvasAgg(figure)


def words_fit(text: str, size: float, width: float) -> bool:
    """Whether a line of text is shorter than a width, with a little room."""
    return len(text) * _CHARACTER * size + 1 <= width


def has_plot() -> bool:
    """Whether PNG files can be made."""
    return importlib.util.find_spec("matplotlib") is not None


def require_plot() -> None:
    """Say how to get what makes PNG files, if it is missing.

    Raises:
        ConfigurationError: It is missing.
    """
    if not has_plot():
        raise ConfigurationError(
            "PNG needs matplotlib: pip install 'lightning-pipeline[plot]', or leave it at SVG"
        )


def _svg_box(box: Box) -> str:
    edge = f' stroke="{box.edge}" stroke-width="0.5"' if box.edge else ""
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}"'
    start = f'<rect {place} fill="{box.fill}"{edge}'
    return f"{start}><title>{escape(box.hint)}</title></rect>" if box.hint else f"{start}/>"


def _svg_words(words: Words) -> str:
    anchor = f' text-anchor="{words.anchor}"' if words.anchor != "start" else ""
    weight = ' font-weight="bold"' if words.bold else ""
    baseline = words.y + _ASCENT * words.size
    return (
        f'<text x="{words.x:.2f}" y="{baseline:.2f}" font-size="{words.size:g}"{anchor}{weight} '
        f'pointer-events="none">{escape(words.text)}</text>'
    )


def _plot_box(axes: Any, box: Box) -> None:
    from matplotlib.patches import Rectangle

    edge = {"edgecolor": box.edge, "linewidth": 0.4} if box.edge else {"linewidth": 0}
    axes.add_patch(Rectangle((box.x, box.y), box.width, box.height, facecolor=box.fill, **edge))


def _plot_words(axes: Any, words: Words) -> None:
    align = {"start": "left", "middle": "center", "end": "right"}[words.anchor]
    weight = "bold" if words.bold else "normal"
    points = 0.66 * words.size  # 0.72 points are a pixel at 100 dpi; matplotlib's font is wider than most
    axes.text(
        words.x, words.y, words.text, fontsize=points, fontweight=weight, ha=align, va="center_baseline"
    )
