"""Templates: found, rendered with types kept, errors with file and line, no way out of the sandbox."""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from dslaunch.core import templating
from dslaunch.core.errors import ConfigError
from dslaunch.core.templating import TemplateFile, render_template


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(templating, "template_root", lambda: tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Batch:
    """A section of a context, as plans have them."""

    train_batch_size: int = 8


CONTEXT = {"batch": Batch(), "precision": "bf16", "scale": 3}


def wrong(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        render_template(TemplateFile("my.j2", text), CONTEXT)
    assert caught.value.exit_code == 2
    return caught.value


def test_shipped_files_are_there() -> None:
    names = set(templating.shipped_files())
    assert "deepspeed/ds_config.json.j2" in names
    assert "hostfiles/two-nodes" in names


def test_values_keep_their_type(root: Path) -> None:
    (root / "t.j2").write_text('{"a": {{ a | json }}, "b": {{ b | json }}, "c": {{ c | json }}}')
    text = render_template("t.j2", {"a": 1e-05, "b": True, "c": "x\"<é'\n"}).text
    assert text == '{"a": 1e-05, "b": true, "c": "x\\"<é\'\\n"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n{{ nothing | json }}", "my.j2:2: 'nothing' is undefined"),
        ("{\n\n{{ batch.nothing }}", "my.j2:3: "),
        ("{\n{% if %}", "my.j2:2: "),
        ("\n\n{{ scale | jsn }}", "my.j2:3: No filter named 'jsn'."),
        ("\n{{ scale / 0 }}", "my.j2:2: ZeroDivisionError: division by zero"),
        ("\n{{ batch | json }}", "my.j2:2: TypeError: "),
        ("{% macro again() %}{{ again() }}{% endmacro %}\n{{ again() }}", "my.j2:1: RecursionError: "),
        ("\n{% include 'gone.j2' %}", "my.j2:2: there is no template gone.j2"),
    ],
)
def test_errors_name_file_and_line(text: str, message: str) -> None:
    assert wrong(text).message.startswith(message)


def test_an_error_in_a_part_names_each_level(root: Path) -> None:
    (root / "part.j2").write_text("\n\n{{ nothing }}")
    (root / "outer.j2").write_text("\n{% include 'part.j2' %}")
    expected = "part.j2:3 (included at outer.j2:2, my.j2:1): 'nothing' is undefined"
    assert wrong("{% include 'outer.j2' %}").message == expected


def test_an_undefined_field_is_told_without_our_class() -> None:
    assert wrong("{{ batch.size }}").message == "my.j2:1: this value has no attribute 'size'"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{{ precison }}", "did you mean precision?"),
        ("{{ batch.train_batchsize }}", "did you mean batch.train_batch_size?"),
        ("{{ train_batch_size }}", "did you mean batch.train_batch_size?"),
        ("{{ qqq }}", "the names are batch, precision, scale"),
    ],
)
def test_an_undefined_name_has_a_hint(text: str, hint: str) -> None:
    assert wrong(text).hint == hint


def test_a_missing_template_is_named(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no template none\.j2"):
        render_template("none.j2", {})


@pytest.mark.parametrize(
    "text",
    [
        "{{ scale.__class__.__mro__ }}",
        "{{ batch.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''.format.__self__.__class__ }}",
        "{{ '{0.__class__.__mro__}'.format(scale) }}",
        "{% include '/etc/passwd' %}",
        "{% include '../../../../../../../../etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ open('/etc/passwd') }}",
        "{{ [].append(1) }}",
    ],
)
def test_a_template_cannot_reach_outside(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render_template(TemplateFile("my.j2", text), CONTEXT)
    assert caught.value.message.startswith("my.j2:1: ")


def test_rendered_text_knows_the_line_that_it_comes_from(root: Path) -> None:
    (root / "part.j2").write_text('{# of a part #}\n"part": 1,\n')
    text = (
        "{# two\n   lines #}\n{\n{% if scale %}\n"  # 1 to 4
        '"a": {{ scale }},\n{% endif %}\n{% include "part.j2" %}\n{% for i in [1, 2] %}\n'  # 5 to 8
        '"b{{ i }}": 1,\n{% endfor %}\n"c": 0\n}'  # 9 to 12
    )
    rendered = render_template(TemplateFile("my.j2", text), CONTEXT)
    assert rendered.text == '{\n"a": 3,\n"part": 1,\n"b1": 1,\n"b2": 1,\n"c": 0\n}'
    places = {'"a"': 5, "3": 5, '"b1"': 9, '"b2"': 9, '"c"': 11}
    for part, line in places.items():
        assert rendered.place(rendered.text.index(part)) == f"my.j2:{line}"
    assert rendered.place(rendered.text.index('"part"')) == "part.j2:2"


def test_a_template_that_looks_at_its_own_text_is_named_without_line() -> None:
    text = "{% set a %}x{% endset %}{% if a == 'x' %}same{% endif %}"
    rendered = render_template(TemplateFile("my.j2", text), CONTEXT)
    assert (rendered.text, rendered.place(0)) == ("same", "my.j2")


TOO_LONG, TOO_SLOW = "makes too long a text", "takes more than 1 s"
NESTED = "{% for i in range(100000) %}{% for j in range(100000) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('1\n{{ "a" * 9999999999 }}', f"my.j2:2: {TOO_LONG}"),
        ("1\n{{ [scale] * 9999999999 }}", f"my.j2:2: {TOO_LONG}"),
        ('{{ "{:>9999999999}".format(scale) }}', f"my.j2:1: {TOO_LONG}"),
        ('{{ "a" * 9999999 }}', f"my.j2: {TOO_LONG}"),
        (NESTED.replace("BODY", ""), f"my.j2:1: {TOO_SLOW}"),
        ("{{ 9 ** (9 ** 9) }}", "my.j2:1: OverflowError: 9 ** 387420489 is too large"),
    ],
)
def test_a_template_without_end_is_an_error(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templating, "_CPU_S", 1.0)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    assert str(wrong(text)) == message
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert render_template(TemplateFile("my.j2", "{{ 2 ** 10 }}{{ scale ** 2 }}"), CONTEXT).text == "10249"
