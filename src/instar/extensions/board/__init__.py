"""The dashboard and the pages that are written to files."""

from instar.extensions import CommandSpec, Extension

_HERE = "instar.extensions.board"
_REPORT = CommandSpec(f"{_HERE}.cli:report", "Write a self-contained HTML report of a run.", "logs")

EXTENSION = Extension(
    name="board",
    summary="runs in a browser: the dashboard, and a run's report",
    commands={
        "report": _REPORT,
        "dashboard": CommandSpec(f"{_HERE}.cli:dashboard", "Watch runs in a browser.", "report"),
        "logs report": _REPORT,
    },
    plots={"html": f"{_HERE}.report:plot_html"},
    at_end=f"{_HERE}.report:write_report_of_run",
)

PLACES = ("page", "styles", "charts")
"""folders beside this file; no two of their files have the same name"""
