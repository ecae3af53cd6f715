"""D07: what the file says is what takes effect, for every key there is, and the dump of it loads to the same config."""

import os
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.config import effective, names
from lora_trainer.config.loading import load
from lora_trainer.errors import ErrorReport

CHOSEN: dict[str, Any] = {
    "family": "auto",  # which families exist is not this test's business
    "base_model": "dono/modelo",
    "vae": "dono/vae",
    "lora_targets": "attention+mlp",
    "adapter_kind": "lora",  # the others contradict DoRA
    "lora_init": "default",  # likewise
    "lora_rules": [{"target": r"attn2\.to_[qk]$", "rank": 32}, {"target": "ff", "alpha": 2.5, "rate": 1e-5}],
    "max_caption_tokens": 150,
    "resolution": (512, 768),
    "bucket_step": 128,
    "background": "#00ff00",
    "device": "cuda:1",
    "cache_text_encoder": "yes",
    "mask": "files",
    "prediction_type": "v_prediction",
    "use_8bit_optimizer": "yes",
    "optimizer_in_backward": "auto",  # yes contradicts clipping
    "block_streaming": 0.25,
    "gradient_checkpointing": "yes",
    "vram": 6.0,
    "optimizer": "lion8bit",
    "betas": [0.8, 0.9],
    "optimizer_args": {"a": "texto", "b": 1e-4, "c": [1, "${x}"], "d": {"e": None, "f": False}},
    "train_text_encoder": False,  # contradicts the text cache
    "debiased": False,  # contradicts min-SNR
    "language": "pt",
    "name": "017 ação",
    "formats": ["diffusers"],
    "title": "custa ${5} \\ \u2028 \x85 'a' \"b\" # c",
    "author": "yes",
    "description": "duas\nlinhas",
    "license": "~",
    "prompts": ["[trigger] na praia", "foto: azul", "2024-01-01"],
    "seed": 2**63 - 1,
    "measure": "demo",
}


def other_value(option: names.Option) -> Any:
    """A valid value that is not the default."""
    if option.name in CHOSEN and option.key != ("samples", "seed"):
        return CHOSEN[option.name]
    if option.kind == "boolean":
        return not option.default
    if option.kind == "choice":
        return next(c for c in option.choices if c != option.default)
    if option.kind == "text":
        return "texto"
    if option.kind in names.PATH_KINDS:
        if option.key == ("output", "dir"):
            return "resultado"  # the image folder would be refused
        if option.name == "regularization_dir":
            return "classe"  # likewise
        return "arquivo.safetensors" if option.name == "initial_lora" else "pasta"
    low = option.limits.get("ge", option.limits.get("gt", 0))
    high = option.limits.get("le", option.limits.get("lt", low + 100))
    for value in (low + (high - low) / 4, low + (high - low) / 3):
        value = max(1, int(value)) if option.kind == "integer" else value
        if value != option.default:
            return value
    raise AssertionError(option)


@pytest.fixture
def everything(tmp_path: Path) -> tuple[Path, dict[names.Key, Any]]:
    """A YAML that sets every key, written with the dump's own writer from values chosen here."""
    (tmp_path / "pasta").mkdir()
    (tmp_path / "classe").mkdir()
    (tmp_path / "arquivo.safetensors").touch()
    values = {key: other_value(option) for key, option in names.options().items()}
    lines = []
    for section in names.sections():
        lines.append(f"{section}:")
        lines += [
            f"  {o.name}: {effective._value(values[key], o)}" for key, o in names.options().items() if key[0] == section
        ]
    path = tmp_path / "tudo.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path, values


SAME_AS_DEFAULT = {("training", "debiased")} | {
    ("model", name) for name in ("family", "train_text_encoder", "adapter_kind", "lora_init")
}


def test_d07_every_key_of_the_file_takes_effect(everything: tuple[Path, dict[names.Key, Any]]) -> None:
    path, values = everything
    loaded = load(path)
    for key, option in names.options().items():
        got = getattr(getattr(loaded.config, key[0]), key[1])
        expected = values[key]
        if option.kind in names.PATH_KINDS and "/" not in str(expected):
            expected = str(path.parent / expected)
        assert got == expected, key
        assert (got == option.default) == (key in SAME_AS_DEFAULT), key
        assert loaded.origins[option.shown("pt")].startswith("tudo.yaml:"), key


def test_d07_the_dump_loads_to_the_same_config(everything: tuple[Path, dict[names.Key, Any]], tmp_path: Path) -> None:
    loaded = load(everything[0], ["treino.epocas=99", "modelo.classificacao_lora=33", "saida.manter_ultimos=9"])
    target = tmp_path / "longe" / "config.yaml"
    effective.write(loaded, target)
    text = target.read_text(encoding="utf-8")
    assert "  epocas: 99  # linha de comando\n" in text
    assert [p.name for p in target.parent.iterdir()] == ["config.yaml"]
    again = load(target)
    assert again.config == loaded.config
    assert again.name == loaded.name
    effective.write(again, target)
    assert load(target).config == loaded.config


def test_d07_the_dump_of_defaults_loads_too(tmp_path: Path) -> None:
    path = tmp_path / "pouco.yaml"
    path.write_text(
        "modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: ., resolucao: 500}\n", encoding="utf-8"
    )
    loaded = load(path)
    target = tmp_path / "saida" / "pouco" / "config.yaml"
    effective.write(loaded, target)
    text = target.read_text(encoding="utf-8")
    assert "  resolucao: [512, 512]  # pouco.yaml:2 (arredondado de 500x500)\n" in text
    assert "  epocas: 10  # padrão\n" in text
    assert '  alvos_lora: "auto"  # padrão\n' in text
    assert '  precisao_mista: "auto"  # padrão\n' in text
    assert load(target).config == loaded.config


def test_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pouco.yaml"
    path.write_text("modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: .}\n", encoding="utf-8")
    target = tmp_path / "config.yaml"
    target.write_text("antigo", encoding="utf-8")
    loaded = load(path)
    object.__setattr__(loaded, "origins", {"treino.epocas": "\ud800"})  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        effective.write(loaded, target)
    assert target.read_text(encoding="utf-8") == "antigo"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "pouco.yaml"]


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "pouco.yaml"
    path.write_text("modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: .}\n", encoding="utf-8")
    target = tmp_path / "run" / "config.yaml"
    target.parent.mkdir()
    dead = 2**22 + 12345  # above the largest process id there is
    kept = [f".config.yaml.{os.getppid()}.tmp", f".outro.yaml.{dead}.tmp", ".config.yaml.texto.tmp"]
    for name in [f".config.yaml.{dead}.tmp", *kept]:
        (target.parent / name).touch()
    effective.write(load(path), target)
    assert sorted(p.name for p in target.parent.iterdir()) == sorted(["config.yaml", *kept])


def test_a_path_that_is_not_utf8_survives_the_dump(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"ima\xe7os")
    folder.mkdir()
    path = tmp_path / "pouco.yaml"
    path.write_text("modelo: {modelo_base: dono/modelo}\n", encoding="utf-8")
    loaded = load(path, [f"dados.diretorio_dados={folder}"])
    effective.write(loaded, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml").config == loaded.config


def test_a_config_whose_own_name_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.yaml")
    path.write_text("modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: .}\n", encoding="utf-8")
    with pytest.raises(ErrorReport) as caught:
        load(path)
    assert "o nome `caf\\xe9` não serve para um arquivo" in str(caught.value)
    str(caught.value).encode("utf-8")
    loaded = load(path, ["saida.nome=cafe"])
    effective.write(loaded, tmp_path / "config.yaml")
    assert "# caf\\xe9.yaml:1" in (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_texts_and_paths_that_are_not_utf8_are_refused_in_words_that_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("modelo: {modelo_base: dono/modelo}\ndados: {diretorio_dados: .}\n", encoding="utf-8")
    odd = os.fsdecode(b"caf\xe9")
    with pytest.raises(ErrorReport) as caught:
        load(path, [f"dados.palavra_gatilho={odd}", f"amostras.prompts={odd}", f"dados.diretorio_mascaras={odd}"])
    text = str(caught.value)
    text.encode("utf-8")
    assert text.count("esperava um texto em UTF-8, veio `caf\\xe9`") == 2
    assert "não existe: " in text
