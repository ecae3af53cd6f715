"""The command line: words to a checked config, then to the part of the program that does the work.

Only argparse is imported up front, so that `--help` is instant; a wrong config is told before torch is loaded.
A sub-command is one line in COMMANDS and the file of commands/ with its Portuguese name.
"""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import __version__, plugins
from .errors import ConfigError, ErrorReport, Interrupted, UserError, set_language, t

INTERRUPTED = 130
OUR_BUG = 1


@dataclass(frozen=True)
class Command:
    pt: str
    en: str
    doc_pt: str
    doc_en: str


def _settings(arguments: argparse.Namespace) -> list[str]:
    """The `key=value` words, and the flags that stand for one."""
    flags = {"sistema.idioma": arguments.language, "memoria.preset": arguments.preset, "memoria.vram": arguments.vram}
    return [*arguments.settings, *(f"{key}={value}" for key, value in flags.items() if value is not None)]


def _train(arguments: argparse.Namespace) -> None:
    """Loaded.notices are told by `run.train`, which also writes them to the log."""
    from .config.loading import load
    from .config.paths import prepare_output

    loaded = load(Path(arguments.config), _settings(arguments))
    prepare_output(loaded.run_dir)
    arguments.log = loaded.run_dir / "registro.log"
    from .journal.interrupt import stop_on_signals

    # OpenMP's threads wait by spinning; on a busy machine that made a step 20 times slower (docs/decisions.md).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    with stop_on_signals() as stop:  # from here on, since loading the libraries takes seconds
        from .run.run import train

        try:
            train(loaded, stop, resume=arguments.resume, restart=arguments.restart)
        except UserError as error:
            error.where = loaded.located(error.where)
            raise
        except Exception:
            stop.check()  # a library that was broken off while it was imported fails in its own way
            raise


TRAIN = Command("treinar", "train", "treina o LoRA (o que acontece sem comando)", "train the LoRA (the default)")
COMMANDS = (
    TRAIN,
    Command(
        "plano", "plan",
        "prevê memória, tempo e técnicas, sem treinar", "predict memory, time and techniques, without training"),
    Command("presets", "presets", "compara os presets de 4 a 24 GB", "compare the presets from 4 to 24 GB"),
    Command(
        "diagnostico", "doctor",
        "examina a máquina e, com --config, a última execução", "examine the machine and, with --config, the last run"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 (the user can mend it), 3 (memory), 4 (diverged), 130 (interrupted) or 1 (our bug)."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure:  # absent where a notebook replaced the stream
            reconfigure(encoding="utf-8", errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    set_language(_early_language(words))
    arguments = argparse.Namespace(debug="--debug" in words or "--depurar" in words, log=None)
    try:
        return _run(words, arguments)
    except (UserError, Interrupted) as error:
        return _tell(error, arguments.debug)
    except KeyboardInterrupt:
        print(t(pt="\ninterrompido", en="\ninterrupted"), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`| head`): without this, the interpreter complains again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUR_BUG
    except Exception:
        traceback.print_exc()
        print(_our_bug(arguments.log), file=sys.stderr)
        return OUR_BUG


def _run(words: Sequence[str], arguments: argparse.Namespace) -> int:
    parser = _parser()
    try:
        _, unknown = parser.parse_known_intermixed_args(words, arguments)
    except SystemExit as leaving:  # --help and --version
        return int(leaving.code or 0)
    if unknown:
        raise _unknown_flags(unknown, parser)
    command = TRAIN
    if arguments.settings and "=" not in arguments.settings[0]:
        command = _find_command(arguments.settings.pop(0))
    if arguments.resume and arguments.restart:
        raise ConfigError.said(
            pt="--retomar e --recomecar não andam juntos",
            en="--resume and --restart exclude each other",
            hint_pt="fique com um dos dois",
            hint_en="keep one of them",
        )
    if command is not TRAIN:
        return plugins.load("lora_trainer.commands", command.pt).show(arguments, _settings(arguments)) or 0
    if not arguments.config:
        print(parser.format_usage(), end="", file=sys.stderr)
        raise ConfigError.said(
            pt="falta --config",
            en="--config is missing",
            hint_pt="por exemplo: python treinar.py --config minha_config.yaml (--help mostra tudo)",
            hint_en="for example: python treinar.py --config my_config.yaml (--help shows everything)",
        )
    _train(arguments)
    return 0


class _Parser(argparse.ArgumentParser):
    """Errors come out as ours, in the language in force."""

    def format_usage(self) -> str:
        return self._speak(super().format_usage())

    def format_help(self) -> str:
        return self._speak(super().format_help())

    @staticmethod
    def _speak(text: str) -> str:
        return text.replace("usage:", t(pt="uso:", en="usage:"), 1)

    def error(self, message: str) -> NoReturn:
        flag = next((word.strip(":,") for word in message.split() if word.startswith("-")), "")
        if "invalid choice" in message:
            flag = flag.split("/")[0]
            raise ConfigError(t(pt=f"valor inválido para {flag}", en=f"invalid value for {flag}"), "pt, en")
        if "expected one argument" in message:
            flag = flag.split("/")[0]
            raise ConfigError.said(pt=f"falta o valor de {flag}", en=f"{flag} needs a value")
        raise ConfigError(message)  # argparse's own English: nothing else of its can happen with these arguments


def _parser() -> _Parser:
    setting = t(pt="chave=valor", en="key=value")
    parser = _Parser(
        prog="treinar.py",
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"treinar.py --config F [{setting} ...]",
        description=t(pt="Treina um LoRA na placa que você tem.", en="Trains a LoRA on the card you have."),
        epilog=_epilog(),
    )
    parser._positionals.title = t(pt="argumentos", en="arguments")
    parser._optionals.title = t(pt="opções", en="options")
    text = t(pt="muda uma opção: treino.epocas=3", en="changes an option: training.epochs=3")
    parser.add_argument("settings", nargs="*", metavar=setting, help=text)
    parser.add_argument("--config", metavar="F", help=t(pt="arquivo YAML da configuração", en="YAML config file"))
    for flags, name, text in (
        (("--retomar", "--resume"), "resume", t(pt="continua do último estado salvo", en="go on from the saved state")),
        (("--recomecar", "--restart"), "restart", t(pt="começa do zero, mesmo com estado salvo", en="start over")),
        (("--json",), "json", t(pt="resposta em JSON (presets, diagnostico)", en="answer in JSON (presets, doctor)")),
        (("--depurar", "--debug"), "debug", t(pt="mostra o rastro completo dos erros", en="show full tracebacks")),
    ):
        parser.add_argument(*flags, dest=name, action="store_true", help=text)
    text = t(pt="4gb, 6gb, 8gb, 12gb, 24gb, auto ou nenhum", en="4gb, 6gb, 8gb, 12gb, 24gb, auto or none")
    parser.add_argument("--preset", metavar="P", help=text)
    text = t(
        pt="usa só N GiB da placa, como se ela fosse menor", en="use only N GiB of the card, as if it were smaller"
    )
    parser.add_argument("--vram", metavar="N", help=text)
    text = t(pt="idioma das mensagens", en="language of the messages")
    parser.add_argument("--idioma", "--lang", dest="language", choices=("pt", "en"), help=text)
    text = t(pt="mostra a versão", en="show the version")
    parser.add_argument("--versao", "--version", action="version", version=f"lora-trainer {__version__}", help=text)
    text = t(pt="mostra esta ajuda", en="show this help")
    parser.add_argument("--ajuda", "--help", "-h", action="help", help=text)
    return parser


def _epilog() -> str:
    head = t(pt="comandos:", en="commands:")
    spelled = {c: c.pt if c.pt == c.en else f"{c.pt} | {c.en}" for c in COMMANDS}
    lines = [f"  {spelled[c]:<22} {t(pt=c.doc_pt, en=c.doc_en)}" for c in COMMANDS]
    more = t(
        pt="As chaves e seus valores estão em configs/schema.json e no README.",
        en="Keys and their values are in configs/schema.json and in the README.",
    )
    return "\n".join([head, *lines, "", more])


def _find_command(word: str) -> Command:
    for command in COMMANDS:
        if word in (command.pt, command.en):
            return command
    known = [name for command in COMMANDS for name in (command.pt, command.en)]
    hint = _did_you_mean(word, known, 0.6) or t(
        pt="use `chave=valor`, por exemplo treino.epocas=3", en="use `key=value`, for example training.epochs=3"
    )
    if word.lower().endswith((".yaml", ".yml")):
        hint = f"python treinar.py --config {word}"
    raise ConfigError(t(pt=f"não conheço o comando `{word}`", en=f"unknown command `{word}`"), hint)


def _unknown_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> UserError:
    """All of them at once, each with the nearest flag, or as the setting it may have been meant to be."""
    known = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    errors = []
    for word in (w for w in unknown if w.startswith("-")):
        flag, _, value = word.partition("=")
        hint = _did_you_mean(flag, known, 0.7) or _as_setting(flag, value)
        errors.append(str(ConfigError(t(pt=f"não conheço `{flag}`", en=f"unknown flag `{flag}`"), hint)))
    return ErrorReport("\n".join(f"{t(pt='erro', en='error')}: {text}" for text in errors))


def _did_you_mean(word: str, known: Sequence[str], cutoff: float) -> str:
    near = difflib.get_close_matches(word, known, 1, cutoff)
    return t(pt=f"você quis dizer `{near[0]}`?", en=f"did you mean `{near[0]}`?") if near else ""


def _as_setting(flag: str, value: str) -> str:
    from .config.names import suggest

    bare = flag.lstrip("-").replace("-", "_")
    example = f"{bare if '.' in bare else t(pt='secao.chave', en='section.key')}={value or '…'}"
    return t(pt=f"opções da configuração vão sem traços: {example}", en=f"config options take no dashes: {example}") + (
        "" if "." in bare else f"; {suggest(bare)}"
    )


def _early_language(words: Sequence[str]) -> str:
    """--idioma, looked for before parsing, because parsing already speaks."""
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--idioma", "--lang"):
            return value if equals else (words[index + 1] if index + 1 < len(words) else "auto")
    return "auto"


def _tell(error: UserError | Interrupted, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, Interrupted):
        print(error, file=sys.stderr)
    else:
        label = "" if isinstance(error, ErrorReport) else t(pt="erro: ", en="error: ")
        print(f"{label}{error}", file=sys.stderr)
    return error.exit_code


def _our_bug(log: Path | None) -> str:
    where = t(pt=f" O registro está em {log}.", en=f" The log is in {log}.") if log else ""
    return t(
        pt=f"Isto é um defeito do programa, não da sua configuração.{where}",
        en=f"This is a bug of the program, not of your config.{where}",
    )
