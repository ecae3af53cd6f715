"""The command line: what it accepts, what it answers, and that a wrong config never waits for torch."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from lora_trainer import __version__, cli
from lora_trainer.errors import DivergedError, DoesNotFitError, Interrupted, UserError

ROOT = Path(__file__).parents[2]
GOOD = "modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: .}\n"
Train = Callable[..., None]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "meu.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Train], None]:
    """Puts a stand-in where the real training would start: these tests are about what happens around it."""

    def put(train: Train) -> None:
        module = ModuleType("lora_trainer.run.run")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lora_trainer.run.run", module)

    return put


def run_python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LORA_TRAINER_LANG": "pt", "PYTHONIOENCODING": "cp1252"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        cwd=cwd,
        check=False,
    )


HEAVY = """
import sys
from lora_trainer.cli import main
code = main(sys.argv[1:])
print("|", code, *sorted(m for m in ("torch", "numpy", "rich", "pydantic", "omegaconf", "yaml") if m in sys.modules))
"""


def test_help_imports_nothing_heavy() -> None:
    done = run_python(HEAVY, "--help")
    assert done.stdout.endswith("| 0\n")
    for word in ("uso: treinar.py --config F", "--retomar, --resume", "treinar | train", "começa do zero"):
        assert word in done.stdout
    assert run_python(HEAVY, "--help", "--lang", "en").stdout.startswith("usage: ")


def test_a_wrong_config_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD + "treino: {épocas: 1}\n", encoding="utf-8")
    done = run_python(HEAVY, "--config", "c.yaml", "saida.titulo=${treino.epoca}", cwd=tmp_path)
    assert done.stdout == "| 2 omegaconf pydantic yaml\n"
    assert "chave desconhecida `épocas`" in done.stderr  # UTF-8 although the console is cp1252
    assert "Traceback" not in done.stderr


def test_treinar_py_and_dash_m_are_the_same(tmp_path: Path) -> None:
    for entry in ([str(ROOT / "treinar.py")], ["-m", "lora_trainer"]):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *entry, "--version"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, f"lora-trainer {__version__}\n")


def test_trains_with_settings_before_and_after_flags(config: Path, train_with: Callable[[Train], None]) -> None:
    calls = []
    train_with(lambda loaded, stop, **flags: calls.append((loaded, flags)))
    arguments = ["treino.epocas=3", "--config", str(config), "dados.resolution=500", "--retomar", "treino.perda=huber"]
    assert cli.main(arguments) == 0
    assert cli.main(["train", *arguments, "--lang", "en"]) == 0
    (loaded, flags), (english, _) = calls
    assert flags == {"resume": True, "restart": False}
    assert (loaded.config.training.epochs, loaded.config.training.loss) == (3, "huber")
    assert english.config.system.language == "en"
    assert english.origins["sistema.idioma"] == "command line"
    assert loaded.run_dir.is_dir()
    (notice,) = loaded.notices
    assert notice.startswith("linha de comando: `dados.resolution`: 500x500 arredondado para 512x512")
    assert english.notices[0].startswith("command line: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "falta --config"),
        (["treino.epocas=3"], "falta --config"),
        (["--config"], "falta o valor de --config"),
        (["--config", "F", "--idioma", "fr"], "valor inválido para --idioma"),
        (["--config", "F", "--retomar", "--recomecar"], "--retomar e --recomecar não andam juntos"),
        (["--conf", "F"], "você quis dizer `--config`?"),
        (["--config", "F", "--resum"], "você quis dizer `--resume`?"),
        (["--config", "F", "--lr", "1e-4"], "aqui esta opção se chama `treino.taxa_aprendizado`"),
        (["--config", "F", "--treino.epocas=3"], "opções da configuração vão sem traços: treino.epocas=3"),
        (["meu.yaml"], "python treinar.py --config meu.yaml"),
        (["treina", "--config", "F"], "você quis dizer `treinar`?"),
        (["--config", "F", "treino.epocas"], "não conheço o comando `treino.epocas`"),
        (["--config", "F", "lr=1"], "chave desconhecida `lr`"),
        (["--config", "F", "a=1", "nada"], "esperava `chave=valor`, veio `nada`"),
    ],
)
def test_wrong_command_lines(
    arguments: Sequence[str], expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(config) if word == "F" else word for word in arguments]) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert "erro: " in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_all_unknown_flags_at_once(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config", str(config), "--retoma", "--verbos=2"]) == 2
    said = capsys.readouterr().err
    assert "não conheço `--retoma`" in said
    assert "não conheço `--verbos`" in said


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (UserError("assim não dá", "faça assado"), 2, "erro: assim não dá\n  = dica: faça assado"),
        (DoesNotFitError("não cabe"), 3, "erro: não cabe"),
        (DivergedError("divergiu"), 4, "erro: divergiu"),
        (Interrupted("parado no passo 3"), 130, "parado no passo 3"),
        (KeyboardInterrupt(), 130, "interrompido"),
        (ValueError("ops"), 1, "Isto é um defeito do programa"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    expected: str,
    config: Path,
    train_with: Callable[[Train], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    train_with(fail)
    assert cli.main(["--config", str(config)]) == code
    said = capsys.readouterr().err
    assert expected in said
    assert ("Traceback" in said) == (code == 1)
    if code == 1:
        assert str(config.parent / "saida" / "meu" / "registro.log") in said
    if isinstance(error, UserError):
        cli.main(["--config", str(config), "--depurar"])
        assert "Traceback" in capsys.readouterr().err


def test_unwritable_output_stops_before_training(
    config: Path, train_with: Callable[[Train], None], capsys: pytest.CaptureFixture[str]
) -> None:
    train_with(lambda *_, **__: pytest.fail("training must not start"))
    (config.parent / "arquivo").touch()
    assert cli.main(["--config", str(config), f"saida.diretorio={config.parent}/arquivo/x"]) == 2
    assert "aqui vai uma pasta" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import os, sys; os.close(1); r, w = os.pipe(); os.close(r); os.dup2(w, 1); from lora_trainer.cli import main\n"
    )
    done = run_python(code + "sys.exit(main(['--help']))")
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
