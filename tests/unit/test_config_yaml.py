"""YAML's traps, from real reports: D01 (numbers), D04 (Windows paths), D09 (the rest)."""

from pathlib import Path

import pytest

from lora_trainer.config import names
from lora_trainer.config.loading import load
from lora_trainer.errors import ErrorReport

BASE = "modelo: {modelo_base: owner/name}\ndados:\n  diretorio_dados: .\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "meu.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ErrorReport) as caught:
        load(path, overrides)
    return str(caught.value)


# -- D01
@pytest.mark.parametrize("text", ["1e-4", "2e-5", "1E-4", "5e-04", "1.0e-4", "1.e-4", ".0001", "'1e-4'", '"1e-4"'])
def test_d01_every_spelling_of_a_float(tmp_path: Path, text: str) -> None:
    value = float(text.strip("'\""))
    path = write(tmp_path, BASE + f"treino:\n  taxa_aprendizado: {text}\n")
    assert load(path).config.training.learning_rate == value
    assert load(write(tmp_path, BASE), [f"treino.learning_rate={text}"]).config.training.learning_rate == value


FLOATS = [o for o in names.options().values() if o.kind == "number"]


@pytest.mark.parametrize("option", FLOATS, ids=lambda o: o.name)
def test_d01_every_float_key_takes_exponents_quoted_or_not(tmp_path: Path, option: names.Option) -> None:
    value = "1e0" if option.name == "lora_plus_ratio" else "5e-01"
    for text in (value, f"'{value}'"):
        written = f"[{text}, {text}]" if option.many else text
        config = load(write(tmp_path, BASE), [f"{option.shown()}={written}"]).config
        got = getattr(getattr(config, option.section), option.name)
        assert (got[0] if option.many else got) == float(value)


@pytest.mark.parametrize("option", FLOATS, ids=lambda o: o.name)
def test_d01_decimal_comma_and_words_are_named(tmp_path: Path, option: names.Option) -> None:
    write(tmp_path, BASE)
    text = problems(tmp_path / "meu.yaml", f"{option.shown()}=0,0001")
    assert "use ponto: 0.0001" in text
    assert f"`{option.pt}`: esperava um número, veio `muito`" in problems(
        tmp_path / "meu.yaml", f"{option.shown()}=muito"
    )


def test_d01_integers(tmp_path: Path) -> None:
    path = write(
        tmp_path, BASE + "treino:\n  epocas: 1e3\n  tamanho_lote: '2'\nsistema: {semente: 9223372036854775807}\n"
    )
    config = load(path).config
    assert (config.training.epochs, config.training.batch_size) == (1000, 2)
    assert config.system.seed == 2**63 - 1
    for value in ("3.7", "1e-1", "inf", "true", "nan", "0x1F"):
        assert "esperava um número inteiro" in problems(path, f"treino.epocas={value}")
    for value in (".inf", "inf", ".nan", "true"):
        assert "esperava um " in problems(path, f"treino.decaimento_pesos={value}")


# -- D04
@pytest.mark.parametrize("path", [r"C:\Users\ana", r"C:\dados"])
def test_d04_double_quoted_windows_path_error_form(tmp_path: Path, path: str) -> None:
    text = problems(write(tmp_path, f'modelo:\n  modelo_base: "{path}"\n'))
    assert "use aspas simples ou /" in text
    assert "meu.yaml:2:" in text
    assert "1 problema" in text


@pytest.mark.parametrize(
    "path", [r"C:\treino\novo", r"C:\Nova", r"C:\Laura", r"C:\Pessoal", r"C:\_x", r"C:\a\b", r"C:\0"]
)
def test_d04_double_quoted_windows_path_silent_form(tmp_path: Path, path: str) -> None:
    text = problems(write(tmp_path, f'modelo:\n  modelo_base: "{path}"\ndados: {{data_dir: .}}\n'))
    assert "`modelo_base`: a barra invertida dentro de aspas duplas" in text
    assert "use aspas simples ou /" in text
    assert "1 problema" in text


@pytest.mark.parametrize("written", [r"C:\treino\novo", r"'C:\treino\novo'", "C:/treino/novo", r'"C:\\treino\\novo"'])
def test_d04_windows_paths_that_parse(tmp_path: Path, written: str) -> None:
    text = problems(write(tmp_path, f"modelo:\n  modelo_base: {written}\ndados: {{data_dir: .}}\n"))
    plain = written.strip("'\"").replace("\\\\", "\\")
    assert f"caminho de outro computador (Windows): {plain}" in text
    assert "1 problema" in text


# -- D09
def test_d09_octal_and_base_60_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        BASE + "  resolucao: 0512\n  maximo_tokens: 0113\ntreino:\n  epocas: 16:9\n  betas: [0.9, 8:30]\n"
        "  argumentos_otimizador: {x: 017, y: '017'}\nsistema:\n  semente: 0123\n",
    )
    text = problems(path)
    for expected in ("escreva 512", "escreva 113", "ponha entre aspas: '16:9'", "'8:30'", "escreva 17", "escreva 123"):
        assert expected in text
    assert "6 problemas" in text
    assert "base 8" in problems(write(tmp_path, BASE), "sistema.semente=0123")


@pytest.mark.parametrize("name", ["2024-01-01", "017", "1.10", "yes", "0x1F", "1_000", "1e-4", "12h30", "não"])
def test_d09_text_keeps_what_was_typed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, BASE + f"saida:\n  nome: {name}\n  titulo: {name}\n  autor: '{name}'\n")
    loaded = load(path, [f"saida.descricao={name}"])
    assert loaded.name == name
    assert (loaded.config.output.title, loaded.config.output.author, loaded.config.output.description) == (name,) * 3


def test_d09_duplicate_keys_show_both_lines(tmp_path: Path) -> None:
    text = problems(write(tmp_path, BASE + "treino:\n  epocas: 1\n  perda: l2\n  epocas: 2\ntreino: {}\n"))
    assert "`epocas` aparece duas vezes" in text
    assert "meu.yaml:7:3" in text
    assert "meu.yaml:5:3" in text
    assert "`treino` aparece duas vezes" in text
    assert "meu.yaml:8:1" in text


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [
        ("  prompt_negativo: [trigger] na praia", 20, "entre aspas simples: '[trigger] na praia'"),
        ("  prompt_negativo: *gato", 20, "entre aspas simples: '*gato'"),
        ("  prompt_negativo: * gato", 20, "entre aspas simples: '* gato'"),
        ("  prompt_negativo: foto: azul", 20, "entre aspas simples: 'foto: azul'"),
        ("  prompts: [a, ${treino.perda}]", 16, "ponha a referência entre aspas"),
        ("  prompts: [a, [trigger] b]", 12, "feche a lista, ou ponha o valor entre aspas"),
        ("  prompt_negativo: {a|b} gato", 20, "entre aspas simples: '{a|b} gato'"),
        ("  prompt_negativo: @gato", 20, "entre aspas simples: '@gato'"),
        ("  prompt_negativo: %gato d'água", 20, "entre aspas simples: '%gato d''água'"),
        ("  prompt_negativo: 'a' b", 24, "entre aspas simples: '''a'' b'"),
        ("  prompt_negativo: 'a", 20, "feche com a mesma aspa"),
        ("\tcada: 1", 1, "troque TAB por espaços"),
        ("  cada 1", 3, "escreva `chave: valor`"),
        ("   cada: 1", 4, "mesma coluna"),
    ],
)
def test_d09_one_clear_message_with_line_and_caret(tmp_path: Path, line: str, column: int, expected: str) -> None:
    text = problems(write(tmp_path, BASE + f"amostras:\n  passos: 3\n{line}\n  orientacao: 2\n"))
    assert f"meu.yaml:6:{column}\n" in text
    assert expected in text
    assert "^" in text
    assert "1 problema" in text


def test_d09_prompts_that_yaml_reads_as_something_else(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        BASE + "  palavra_gatilho: [trigger]\namostras:\n  prompts:\n    - [trigger]\n    - foto: azul\n    - ok\n"
        "  prompt_negativo: {a|b}\n",
    )
    text = problems(path)
    assert "`palavra_gatilho` espera um valor só, mas o YAML leu uma lista" in text
    assert "`prompts` espera um valor só, mas o YAML leu uma lista" in text
    assert "mas o YAML leu `chave: valor`" in text
    assert text.count("se é texto, ponha entre aspas simples") == 4


def test_d09_prompts_need_no_inner_quotes_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    for text in ("[trigger] na praia", "*gato", "foto: azul", "{a|b} gato", "#1 gato", "- a", "[a]: b", "d'água"):
        config = load(path, [f"amostras.prompts={text}", f"amostras.negative_prompt={text}"]).config
        assert (config.samples.prompts, config.samples.negative_prompt) == ([text], text)
    assert load(path, ["amostras.prompts=[um gato, um cão]"]).config.samples.prompts == ["um gato", "um cão"]


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system x", "!env X", "!!binary aGk="]
)
def test_d09_tags_are_refused(tmp_path: Path, tag: str) -> None:
    text = problems(
        write(
            tmp_path, BASE + f"saida:\n  titulo: {tag}\ntreino: {{argumentos_otimizador: {{a: {tag.split()[0]} x}}}}\n"
        )
    )
    assert "a etiqueta `!" in text or "espera um valor só" in text
    assert "meu.yaml:5:" in text


def test_d09_anchors_and_merge_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "x-comum: &comum\n  epochs: 5\n  perda: huber\n" + BASE + "  repeticoes: &n 3\n"
        "treino:\n  <<: *comum\n  epocas: 7\n  passos_maximos: *n\n",
    )
    training = load(path).config.training
    assert (training.epochs, training.loss, training.max_steps) == (7, "huber", 3)
    text = problems(write(tmp_path, BASE + "treino:\n  argumentos_otimizador: &a {x: *a}\n"))
    assert "âncora YAML que se repete sem fim" in text


def test_encodings(tmp_path: Path) -> None:
    text = BASE + "saida: {titulo: ação}\n"
    for data in (b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode(), text.encode("utf-16")):
        loaded = load(write(tmp_path, data))
        assert loaded.config.output.title == "ação"
        assert loaded.notices == []
    loaded = load(write(tmp_path, text.encode("cp1252")))
    assert loaded.config.output.title == "ação"
    assert "lido como Windows-1252" in loaded.notices[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "falta `modelo.modelo_base`"),
        ("# só comentário\n", "falta `modelo.modelo_base`"),
        ("- a\n- b\n", "precisa ter seções no primeiro nível"),
        ("olá", "precisa ter seções no primeiro nível"),
        ("treino: 5\n", "`treino` é uma seção"),
        ("treino:\n  epocas:3\n", "`treino` é uma seção"),
        ("treino: [epocas]\n", "`treino` é uma seção"),
        ("a: 1\n---\nb: 2\n", "mais de um documento"),
        ("treino.epocas: 3\n", "no arquivo, escreva a seção numa linha"),
        ("? [a, b]\n: 1\n", "uma chave precisa ser um nome"),
        ("treino:\n  epocas:\n", "`epocas` está sem valor"),
        ("treino:\n  epocas: [1, 2]\n", "`epocas` espera um valor só"),
        ("a: \x07\n", "U+0007"),
    ],
)
def test_odd_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problems(write(tmp_path, text))


def test_empty_section_and_null(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "treino:\n#  epocas: 3\n")
    assert load(path).config.training.epochs == 10
    parent = tmp_path / "pai.yaml"
    parent.write_text("modelo: {classificacao_conv: 4, alvos_lora: tudo}\n", encoding="utf-8")
    path = write(tmp_path, "herda: pai.yaml\n" + BASE.replace("{modelo", "{conv_rank: ~, modelo"))
    assert load(path).config.model.conv_rank is None
