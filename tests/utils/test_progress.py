"""A bar shows on terminals, and where it is asked for."""

from megascale.utils.progress import progress


def test_silent_where_stderr_is_no_terminal(capsys):
    with progress(10, "byte", "reading") as bar:
        bar.update(10)
    assert capsys.readouterr().err == ""


def test_shown_when_asked_for(capsys):
    with progress(10, "byte", "reading", enabled=True) as bar:
        bar.update(10)
    captured = capsys.readouterr()
    assert "reading" in captured.err
    assert "100%" in captured.err
    assert captured.out == ""


def test_hidden_when_asked_for(capsys):
    with progress(None, "byte", "reading", enabled=False) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""
