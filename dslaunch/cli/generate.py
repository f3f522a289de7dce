"""``dslaunch generate``: answers from an exported model or adapter."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import click

from dslaunch.core.errors import ConfigError


@click.command("generate")
@click.argument("model", metavar="DIR")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="What to ask; may be repeated. '-' reads one prompt from stdin.",
)
@click.option("--system", metavar="TEXT", help="A system message before each prompt.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="The most tokens an answer may have.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code from the model's repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    prompts: tuple[str, ...],
    system: str | None,
    max_new_tokens: int,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Answer prompts with the model or adapter in DIR (or a .gguf file, or a hub id).

    Decoding is greedy: the same prompt gives the same answer.
    """
    texts = list(_read_prompts(prompts))
    from dslaunch.cli.existing import check_model

    check_model(model)
    from dslaunch.train.quiet import quiet_libraries, stdout_is_data

    quiet_libraries()
    with stdout_is_data():
        from dslaunch.train.generate import answer_prompts, load_generator

        generator = load_generator(model, trust_remote_code=trust_remote_code)
    answers = []
    for answer in answer_prompts(generator, texts, max_new_tokens=max_new_tokens, system=system):
        if as_json:
            answers.append(dataclasses.asdict(answer))
        else:
            if len(texts) > 1:
                click.echo(f"> {answer.prompt}")
            click.echo(answer.text)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "model": model, "answers": answers}, indent=2))
    return 0


def _read_prompts(prompts: tuple[str, ...]) -> Iterator[str]:
    if not prompts:
        raise ConfigError("nothing to answer", hint="give --prompt TEXT, or --prompt - to read stdin")
    if prompts.count("-") > 1:
        raise ConfigError("--prompt - reads all of stdin, so it can be given only once")
    for prompt in prompts:
        text = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
        if not text.strip():
            raise ConfigError("the prompt on stdin is empty" if prompt == "-" else "a prompt is empty")
        yield text
