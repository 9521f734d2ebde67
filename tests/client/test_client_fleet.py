"""Fleet files: a server a line, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtoken.base.errors import RefusedError
from vtoken.client import read_fleet


def test_a_line_is_a_server_with_its_name_and_the_token_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTOKEN_TOKEN", "of-the-environment")
    (tmp_path / "gpu 7.token").write_text("of-its-own-file\n")
    file = tmp_path / "all.fleet"
    file.write_text(
        "# production\n\n  http://gpu7:8000/  token-file='gpu 7.token' name=seven\nhttp://gpu8:8000\n"
    )
    seven, eight = read_fleet(file, engine=1)
    assert (seven.url, seven.label, seven.token) == (
        "http://gpu7:8000",
        "seven",
        "of-its-own-file",
    )
    assert (eight.label, eight.token, eight.engine) == ("gpu8:8000", "of-the-environment", 1)
    assert "of-" not in repr([seven, eight])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://a\nftp://gpu7\n", "line 2: not a server: 'ftp://gpu7'"),
        ("http://a nmae=b\n", "line 1: 'nmae=b' is not an option"),
        ("http://a name=\n", "line 1: 'name=' is not an option"),
        ("http://a token-file=none\n", "line 1: cannot read the token file"),
        ("http://a\nhttp://a/\n", "line 2: http://a is named twice"),
        ("http://a name=x\nhttp://b name=x\n", "line 2: x is named twice"),
        ("http://user:secret@a\n", "line 1: a server's address must have no user"),
        ("http://a 'name=b\n", "line 1: No closing quotation"),
        ("# nothing\n", "names no server"),
        ("\n".join(f"http://h{n}" for n in range(257)), "line 257: too many servers"),
    ],
)
def test_errors_name_file_and_line_and_never_a_secret(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "all.fleet"
    file.write_text(text)
    with pytest.raises(RefusedError) as caught:
        read_fleet(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)
