"""Where the program is in a response."""

from __future__ import annotations

import pytest

from dagrl.rewards.code.reward import program_in


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("First\n```python\na\n```\nthen\n```py\nb\n```\nend", "b\n"),
        ("```Python3 title=x\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```\noutput: 3\n```", "a\n"),
        ("```python\na\n```\n```python\n\n```", "a\n"),
        ("thoughts ```python is``` nice\n```python\na\n", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("```python\nprint('```')\n```\n", "print('```')\n"),
        ("```bash\nls\n```", None),
        ("~~~python\na\n~~~", "a\n"),
        ("~~~\na\n~~~\nend", "a\n"),
        ("~~~py\nprint('```')\n```\n~~~", "print('```')\n```\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("```python\na\n````", "a\n"),
        ("```python\na\n```\n~~~python\nb\n~~~", "b\n"),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, program: str | None) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize("stuck", ["a", " ", "\t`", "~", "`"])
def test_a_line_without_end_is_read_once(stuck: str) -> None:
    # Otherwise this takes an hour.
    assert program_in("```python\na\n```\n```" + stuck * 1_000_000) == "a\n"
