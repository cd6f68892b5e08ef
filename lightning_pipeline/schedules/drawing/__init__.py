"""Pictures of plans, as text and as SVG."""

from lightning_pipeline.schedules.drawing.panels import Panel, Span, arrange, draw_svg, title_of
from lightning_pipeline.schedules.drawing.picture import Picture, has_plot, require_plot
from lightning_pipeline.schedules.drawing.text import beginning, draw

__all__ = [
    "Panel",
    "Picture",
    "Span",
    "arrange",
    "beginning",
    "draw",
    "draw_svg",
    "has_plot",
    "require_plot",
    "title_of",
]
