"""The command's own part: its port, its browser, what it needs."""

import os
import socket
import sys
import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner

from instar.config.errors import ConfigError
from instar.extensions.board import server as serve
from instar.extensions.board.cli import dashboard


def test_without_a_wish_any_port_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(serve, "PORT", other.getsockname()[1])
        address = serve.bind("127.0.0.1", None, None)
    os.close(address.descriptor)
    assert address.port != 0
    assert address.url == f"http://127.0.0.1:{address.port}/?token={address.token}"


def test_the_page_is_opened_in_a_browser_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", urls.append)
    monkeypatch.setattr(
        serve, "serve_dashboard", lambda _, address, __, **___: os.close(address.descriptor)
    )
    result = CliRunner().invoke(dashboard, [str(tmp_path / "later"), "--port", "0", "-e"])
    assert result.exit_code == 0
    page_url, token = result.stdout.strip().split("?token=")
    assert urls[0].startswith(f"{page_url}?token=")
    assert token not in urls[0]
    assert "later does not exist yet" in result.stderr


@pytest.mark.parametrize("library", ["starlette.applications", "uvicorn"])
def test_what_is_not_installed_is_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("instar.extensions.board.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    result = CliRunner().invoke(dashboard, [str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert f"needs {library.partition('.')[0]}" in str(result.exception)
    assert "pip install 'instar[dashboard]'" in str(result.exception)


def test_help_needs_no_server() -> None:
    code = (
        "import sys; from instar.cli.main import main; main(['dashboard', '--help']); "
        "sys.exit(bool({'starlette', 'uvicorn', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0
