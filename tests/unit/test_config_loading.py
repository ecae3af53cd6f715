"""Precedence, both languages, inheritance, and one report for everything (DESIGN §2)."""

import shutil
from pathlib import Path

import pytest

from lora_trainer.config.loading import Loaded, load
from lora_trainer.errors import ErrorReport, UserError, language

SEED = Path(__file__).parents[1] / "data" / "configuracao_baixa_vram.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.safetensors").touch()
    (tmp_path / "fotos").mkdir()
    return tmp_path


BASE = "modelo:\n  modelo_base: base.safetensors\ndados:\n  diretorio_dados: fotos\n"


def write(folder: Path, text: str, name: str = "meu.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ErrorReport) as caught:
        load(path, overrides)
    return str(caught.value)


def test_the_seed_loads_unedited(tmp_path: Path) -> None:
    path = Path(shutil.copy(SEED, tmp_path))
    (tmp_path / "modelos").mkdir()
    (tmp_path / "modelos" / "v1-5-pruned.safetensors").touch()
    (tmp_path / "dados" / "meu_estilo").mkdir(parents=True)
    loaded = load(path)
    assert loaded.config.model.base_model == str(tmp_path / "modelos" / "v1-5-pruned.safetensors")
    assert loaded.config.data.data_dir == str(tmp_path / "dados" / "meu_estilo")
    assert (loaded.config.model.lora_rank, loaded.config.model.lora_alpha) == (4, 8.0)
    assert (loaded.config.training.batch_size, loaded.config.training.gradient_accumulation_steps) == (1, 4)
    assert (loaded.config.training.learning_rate, loaded.config.training.mixed_precision) == (1e-4, "fp16")
    assert (loaded.config.training.epochs, loaded.config.system.seed) == (10, 42)
    assert loaded.name == "configuracao_baixa_vram"
    assert loaded.notices == []
    assert loaded.origins["treino.tamanho_lote"] == "configuracao_baixa_vram.yaml:10"


def test_precedence_and_origins(folder: Path) -> None:
    write(folder, "treino: {epocas: 2, potencia: 2}\nsistema: {semente: 1}\nsaida: {precisao: bf16}\n", "pai.yaml")
    preset = write(folder, "treino: {epocas: 1, decaimento_pesos: 0.5}\nmodelo: {dropout_lora: 0.1}\n", "8gb.yaml")
    path = write(folder, BASE + "herda: pai.yaml\ntraining:\n  epochs: 3\nsystem: {seed: 2}\n")
    loaded = load(path, ["treino.epocas=4"], extra=[("preset 8gb", preset)])
    assert loaded.config.training.epochs == 4
    assert loaded.config.system.seed == 2
    assert loaded.config.output.precision == "bf16"
    assert loaded.config.training.weight_decay == 0.5
    assert loaded.origins["treino.epocas"] == "linha de comando"
    assert loaded.origins["sistema.semente"] == "meu.yaml:8"
    assert loaded.origins["saida.precisao"] == "pai.yaml:3"
    assert loaded.origins["treino.decaimento_pesos"] == "preset 8gb:1"
    assert loaded.origins["treino.perda"] == "padrão"


def test_extends_a_list_the_later_wins_and_paths_belong_to_their_file(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "imgs").mkdir()
    write(folder / "sub", "data: {data_dir: imgs}\ntreino: {epocas: 1}\n", "a.yaml")
    write(folder / "sub", "treino: {epocas: 2}\n", "b.yaml")
    path = write(folder, "extends: [sub/a.yaml, sub/b.yaml]\nmodelo: {modelo_base: base.safetensors}\n")
    loaded = load(path)
    assert loaded.config.training.epochs == 2
    assert loaded.config.data.data_dir == str(folder / "sub" / "imgs")


def test_extends_circle_and_missing_parent(folder: Path) -> None:
    write(folder, "herda: meu.yaml\n", "outro.yaml")
    text = problems(write(folder, BASE + "herda: [outro.yaml, outr.yaml]\n"))
    assert "em círculo: meu.yaml -> outro.yaml -> meu.yaml" in text
    assert "outro.yaml:1:8" in text
    assert "`" + str(folder / "outr.yaml") + "` não existe" in text
    assert "ao lado existe `outro.yaml`" in text


@pytest.mark.parametrize("key", ["treino.epocas", "training.epochs", "treino.epochs", "training.epocas"])
def test_both_languages_mix_on_the_command_line(folder: Path, key: str) -> None:
    assert load(write(folder, BASE), [f"{key}=7"]).config.training.epochs == 7


def test_words_in_both_languages(folder: Path) -> None:
    path = write(
        folder,
        BASE + "  cache_codificador_texto: sim\n  mascara: não\n  corte: aleatorio\n"
        "treino:\n  precisao_mista: no\n  agendador: cosine\n  checkpoint_gradiente: Não\n  otimizador: AdamW8bit\n",
    )
    config = load(path, ["modelo.alvos_lora=atenção+mlp"]).config
    assert (config.data.cache_text_encoder, config.data.mask, config.data.crop) == ("yes", "no", "random")
    assert (config.training.mixed_precision, config.training.lr_scheduler) == ("no", "cosine")
    assert config.training.gradient_checkpointing == "no"
    assert config.training.optimizer == "adamw8bit"
    assert config.model.lora_targets == "attention+mlp"


def test_same_option_twice_in_one_source(folder: Path) -> None:
    text = problems(
        write(folder, BASE + "  tamanho_lote: 2\ntreino:\n  epocas: 1\n  epochs: 2\n  tamanho_lote: 1\n"),
        "treino.perda=l2",
        "training.loss=huber",
    )
    assert "`epochs` repete `epocas`: são a mesma opção" in text
    assert "meu.yaml:8:3" in text
    assert "e também" in text
    assert "meu.yaml:7:3" in text
    assert "`treino.tamanho_lote` repete `dados.tamanho_lote`" in text
    assert "meu.yaml:5:3" in text
    assert "`loss` repete `perda`" in text
    assert text.endswith("3 problemas em " + str(folder / "meu.yaml") + "; nada foi iniciado.")


def test_same_option_in_two_sources_is_no_clash(folder: Path) -> None:
    path = write(folder, BASE + "  tamanho_lote: 2\n")
    assert load(path, ["training.batch_size=3"]).config.training.batch_size == 3


def test_interpolation_in_either_language(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMENTE_DE_TESTE", "77")
    path = write(
        folder,
        BASE + "treino:\n  epocas: 3\n  passos_maximos: ${training.epochs}\n"
        "saida:\n  nome: r${modelo.classificacao_lora}-e${treino.epocas}\n  titulo: um \\${literal}\n"
        "sistema: {semente: '${oc.env:SEMENTE_DE_TESTE}'}\n",
    )
    config = load(path, ["treino.epocas=5"]).config
    assert config.training.max_steps == 5
    assert config.output.name == "r16-e5"
    assert config.output.title == "um ${literal}"
    assert config.system.seed == 77


def test_interpolation_that_leads_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAO_EXISTE_MESMO", raising=False)
    text = problems(
        write(
            folder,
            BASE + "treino:\n  epocas: ${treino.epoca}\n  passos_maximos: ${treino.max_steps}\n"
            "sistema: {semente: '${oc.env:NAO_EXISTE_MESMO}'}\nsaida: {titulo: 'a ${ b'}\n"
            "samples: {prompts: ['${HOME}']}\n",
        )
    )
    assert "`treino.epoca` não é uma opção" in text
    assert "você quis dizer `epocas`?" in text
    assert "circular" in text
    assert "NAO_EXISTE_MESMO não existe" in text
    assert "`saida.titulo` tem `${` sem uma referência válida" in text
    assert "5 problemas" in text


@pytest.mark.parametrize(("written", "hint"), [("treino.nada", "chaves aceitas aqui: epocas"), ("treino.epoca", "`epocas`")])
def test_a_reference_is_mended_within_its_own_section(folder: Path, written: str, hint: str) -> None:
    text = problems(write(folder, BASE + f"treino:\n  epocas: ${{{written}}}\n"))
    assert hint in text
    assert "outra seção" not in text


def test_unknown_keys_get_the_nearest_name(folder: Path) -> None:
    text = problems(
        write(
            folder,
            BASE + "  resolução: 512\nmodel_: {}\nmodel:\n  clasificacao_lora: 8\n  network_dim: 8\n  epocas: 3\n"
            "treino:\n  max_train_epochs: 1\n  taxa_aprendisado: 1\n",
        ),
        "lr=1",
        "treino.max_step=3",
        "epocas=3",
        "herda=x",
        "nada",
    )
    for expected in (
        "você quis dizer `resolucao`?",
        "você quis dizer `model`?",
        "a seção `model` aparece duas vezes",
        "aqui esta opção se chama `treino.epocas`",
        "você quis dizer `taxa_aprendizado`?",
        "chave desconhecida `lr`",
        "aqui esta opção se chama `treino.taxa_aprendizado`",
        "você quis dizer `max_steps`?",
        "esta opção fica em outra seção: `treino.epocas`",
        "`herda` só vale em arquivo",
        "esperava `chave=valor`, veio `nada`",
    ):
        assert expected in text


def test_names_of_other_trainers_and_of_other_sections(folder: Path) -> None:
    text = problems(
        write(
            folder,
            "model:\n  pretrained_model_name_or_path: x\n  network_dim: 8\n  clasificacao_lora: 4\n  epocas: 3\n",
        )
    )
    assert "`modelo.modelo_base`" in text
    assert text.count("aqui esta opção se chama `modelo.classificacao_lora`") == 1
    assert "você quis dizer `classificacao_lora`?" in text
    assert "outra seção: `treino.epocas`" in text
    assert "falta `dados.diretorio_dados`" in text


def test_report_has_place_line_caret_and_allowed(folder: Path) -> None:
    path = write(folder, BASE + "treino:\n  precisao_mista: bf32\n  epochs: 0\n")
    expected = (
        "erro: `precisao_mista`: esperava um destes: auto, fp16, bf16, nao, veio `bf32`\n"
        f"  --> {path}:6:19\n"
        " 6 |   precisao_mista: bf32\n"
        "   |                   ^^^^\n"
        "   = dica: você quis dizer `bf16`?\n"
    )
    text = problems(path)
    assert expected in text
    assert f"{path}:7:11" in text
    assert "entre 1 e 1000000" in text


def test_messages_follow_sistema_idioma_even_in_a_broken_file(folder: Path) -> None:
    assert "tab character on line 5" in problems(write(folder, BASE + "\tx: 1\nsistema:\n  idioma: en\n"))
    assert language() == "en"
    assert "1 problem in" in problems(write(folder, BASE + "treino: {epocas: 0}\n"), "system.language=en")
    assert "1 problema em" in problems(write(folder, BASE + "treino: {epocas: 0}\n"))


@pytest.mark.parametrize("name", ["con", "a/b", "a\\b", "a:b", "fim.", " x", "x" * 300, ".oculto", "a?"])
def test_names_that_are_no_file_names(folder: Path, name: str) -> None:
    assert "o nome `" in problems(write(folder, BASE), f"saida.nome='{name}'")


def test_name_defaults_to_the_files_stem(folder: Path) -> None:
    loaded = load(write(folder, BASE, "meu estilo.yaml"))
    assert (loaded.name, loaded.config.output.name) == ("meu estilo", "meu estilo")
    assert loaded.run_dir == folder / "saida" / "meu estilo"


def test_missing_points_at_the_section(folder: Path) -> None:
    path = write(folder, "modelo:\n  classificacao_lora: 4\ndados:\n  diretorio_dados: null\n")
    text = problems(path)
    assert "falta `modelo.modelo_base`" in text
    assert f"{path}:1:1" in text
    assert f"{path}:4:20" in text


def test_free_mapping_is_joined_across_sources(folder: Path) -> None:
    path = write(folder, BASE + "treino:\n  argumentos_otimizador: {decouple: true, d0: 1e-6, modo: 'rápido'}\n")
    loaded = load(path, ["treino.argumentos_otimizador.d0=1e-5", "treino.argumentos_otimizador.novo=[1, 2]"])
    assert loaded.config.training.optimizer_args == {"decouple": True, "d0": 1e-5, "modo": "rápido", "novo": [1, 2]}


def test_files_that_are_no_config(folder: Path) -> None:
    binary = folder / "modelo.safetensors"
    binary.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    large = folder / "grande.yaml"
    large.write_bytes(b"#" * 1_000_001)
    for path, expected in (
        (binary, "não é um arquivo de texto"),
        (large, "grande demais"),
        (folder, "é uma pasta"),
        (folder / "men.yaml", "não existe"),
    ):
        with pytest.raises(UserError, match=expected):
            load(path)


def test_loaded_is_frozen(folder: Path) -> None:
    loaded = load(write(folder, BASE))
    assert isinstance(loaded, Loaded)
    with pytest.raises(AttributeError):
        loaded.name = "x"  # type: ignore[misc]
