"""Tables are plain and whole in a pipe, and styled on a terminal."""

from dagrl.tables import render, table


def test_columns_are_aligned_below_their_headings():
    rows = [["weights", "0.3"], ["logits", "12.5"]]
    assert render(["memory", table(rows, headings=["kind", "GiB"])]) == (
        "memory\n  kind      GiB\n  weights   0.3\n  logits   12.5\n"
    )
    assert render([table(rows, left=range(2))]) == "  weights  0.3\n  logits   12.5\n"


def test_nothing_is_cut_folded_or_read_as_markup():
    long = "[bold] :smile: " + "x" * 500
    assert render([long, table([[long, long]])]) == f"{long}\n  {long}  {long}\n"


def test_only_a_terminal_gets_styles(monkeypatch):
    content = [table([["1"]], headings=["count"])]
    assert "\x1b" not in render(content)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1mcount" in render(content)
