"""D06: paths of another PC, relative paths, missing and unwritable output folders."""

import os
import sys
from pathlib import Path

import pytest

from lora_trainer.config import names, paths
from lora_trainer.config.loading import load
from lora_trainer.errors import ErrorReport, MachineError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """cfg/p.yaml, ds/, modelos/base.safetensors"""
    for name in ("cfg", "ds", "modelos"):
        (tmp_path / name).mkdir()
    (tmp_path / "modelos" / "base.safetensors").touch()
    return tmp_path


def write(tree: Path, base: str = "../modelos/base.safetensors", data: str = "../ds", rest: str = "") -> Path:
    path = tree / "cfg" / "p.yaml"
    path.write_text(f"modelo:\n  modelo_base: {base}\ndados:\n  diretorio_dados: {data}\n{rest}", encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ErrorReport) as caught:
        load(path, overrides)
    return str(caught.value)


def test_every_path_option_says_what_must_be_there() -> None:
    by_kind = {kind: {o.name for o in names.options().values() if o.kind == kind} for kind in names.PATH_KINDS}
    assert by_kind == {
        "path_or_hub": {"base_model", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"},
        "local_path": {"initial_lora", "training_lora", "data_dir"},
        "folder": {"tokenizer", "architecture", "mask_dir", "regularization_dir"},
        "output_folder": {"cache_dir", "dir"},
    }


def test_same_result_from_any_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tree)
    configs = []
    for cwd, given in ((Path("/"), path), (tree / "cfg", Path("p.yaml")), (tree, Path("cfg/p.yaml"))):
        monkeypatch.chdir(cwd)
        configs.append(load(given).config)
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].data.data_dir == str(tree / "ds")
    assert configs[0].output.dir == str(tree / "cfg" / "saida")


def test_command_line_paths_are_relative_to_where_it_runs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    config = load(write(tree), ["saida.diretorio=fora", "dados.data_dir=ds"]).config
    assert config.output.dir == str(tree / "fora")
    assert config.data.data_dir == str(tree / "ds")


@pytest.mark.parametrize(
    "written", ["~/ds", "${HOME}/ds", "'${oc.env:HOME}/ds'", "'../ds '", "  ../ds  ", "../ds/../ds/"]
)
def test_home_variables_and_stray_spaces(tree: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv("HOME", str(tree))
    monkeypatch.setenv("USERPROFILE", str(tree))
    loaded = load(write(tree, data=written))
    assert loaded.config.data.data_dir == str(tree / "ds")
    assert [n for n in loaded.notices if "espaço" in n] == (
        ["p.yaml:4: espaço sobrando em `dados.diretorio_dados` ignorado"] if written == "'../ds '" else []
    )


def test_unknown_variable_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEM_ESSA", raising=False)
    text = problems(write(tree, data="${SEM_ESSA}/ds"))
    assert "a variável de ambiente SEM_ESSA não existe" in text
    assert "1 problema" in text


def test_all_missing_paths_at_once_with_what_lies_beside(tree: Path) -> None:
    (tree / "cfg" / "tok").touch()
    rest = "  diretorio_mascaras: ../nada/masc\n  mascara: arquivos\nmodel_x: 1\n"
    path = write(tree, "../modelos/bas.safetensors", "../DS2", rest)
    text = problems(path, f"modelo.tokenizador={tree}/cfg/tok", f"modelo.lora_inicial={tree}/modelos")
    assert f"`modelo.modelo_base` não existe: {tree}/modelos/bas.safetensors" in text
    assert "ao lado existe `base.safetensors`" in text
    assert f"`dados.diretorio_dados` não existe: {tree}/DS2" in text
    assert "ao lado existe `ds`" in text
    assert f"a pasta {tree}/nada não existe" in text
    assert f"`modelo.tokenizador` é um arquivo, e aqui vai uma pasta: {tree}/cfg/tok" in text
    assert f"{path}:2:16" in text
    assert '"../DS2"' not in text
    assert "5 problemas" in text


@pytest.mark.skipif(os.name == "nt", reason="a drive letter is no foreign path there")
def test_windows_paths_on_another_system(tree: Path) -> None:
    text = problems(write(tree, "D:/modelos/x.safetensors"), "saida.diretorio=D:\\lora")
    assert "`modelo.modelo_base` é um caminho de outro computador (Windows): D:/modelos/x.safetensors" in text
    assert "`saida.diretorio` é um caminho de outro computador (Windows): D:\\lora" in text
    loaded = load(write(tree, "..\\modelos\\base.safetensors"))
    assert loaded.config.model.base_model == str(tree / "modelos" / "base.safetensors")
    assert "lido como `../modelos/base.safetensors`" in loaded.notices[0]


def test_hub_ids_and_paths(tree: Path) -> None:
    assert load(write(tree, "dono/modelo-1.5")).config.model.base_model == "dono/modelo-1.5"
    (tree / "cfg" / "dono").mkdir()
    assert f"não existe: {tree}/cfg/dono/modelo-1.5" in problems(write(tree, "dono/modelo-1.5"))
    text = problems(write(tree, "modelo"), "modelo.vae=a/b/c", "modelo.tokenizador=dono/tok")
    assert "`modelo` não é um id do Hugging Face" in text
    assert "`a/b/c` não é um id" in text
    assert "`modelo.tokenizador` não existe" in text
    for path in ("./dono2/x", "dono2/x.safetensors", "~/x", "/x/y"):
        assert "não existe: " in problems(write(tree, path))
    assert "`modelo.modelo_base` está vazio" in problems(write(tree, "''"))


def test_output_folder_is_created_and_a_file_in_the_way_is_found(tree: Path) -> None:
    loaded = load(write(tree, rest="saida: {diretorio: ../novo/fundo}\n"))
    assert not (tree / "novo").exists()
    paths.prepare_output(loaded.run_dir)
    assert (tree / "novo" / "fundo" / "p").is_dir()
    assert list((tree / "novo" / "fundo" / "p").iterdir()) == []
    text = problems(write(tree, rest="saida: {diretorio: ../modelos/base.safetensors/x}\n"))
    assert f"{tree}/modelos/base.safetensors é um arquivo, e aqui vai uma pasta" in text


def test_unwritable_output_is_found_at_start(tree: Path) -> None:
    (tree / "arquivo").touch()
    with pytest.raises(MachineError, match="não consigo gravar em"):
        paths.prepare_output(tree / "arquivo" / "x")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_output_is_in_the_report(tree: Path) -> None:
    (tree / "ro").mkdir(mode=0o555)
    assert "sem permissão para gravar" in problems(write(tree, rest="saida: {diretorio: ../ro}\n"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system nobody may write to")
def test_file_system_nobody_may_write_to() -> None:
    with pytest.raises(MachineError, match="outra pasta"):
        paths.prepare_output(Path("/proc/lora"))
