"""D02 (sizes that do not fit) and H05 (keys that contradict each other)."""

from pathlib import Path

import pytest

from lora_trainer import plugins
from lora_trainer.config import notices
from lora_trainer.config.loading import Loaded, load
from lora_trainer.diffusion.transformer import TransformerFamily
from lora_trainer.errors import ErrorReport
from lora_trainer.families import family_class

BASE = "modelo: {modelo_base: owner/name}\ndados: {diretorio_dados: .}\n"


def loaded(folder: Path, *overrides: str) -> Loaded:
    path = folder / "meu.yaml"
    path.write_text(BASE, encoding="utf-8")
    return load(path, overrides)


def problems(folder: Path, *overrides: str) -> str:
    with pytest.raises(ErrorReport) as caught:
        loaded(folder, *overrides)
    return str(caught.value)


# -- D02
@pytest.mark.parametrize(
    ("written", "sides"),
    [
        ("760", (768, 768)),
        ("500", (512, 512)),
        ("544", (512, 512)),
        ("512x760", (512, 768)),
        ("[512, 760]", (512, 768)),
        ("512,760", (512, 768)),
        ("512 × 760", (512, 768)),
        ("90", (64, 64)),
    ],
)
def test_d02_rounded_and_said(tmp_path: Path, written: str, sides: tuple[int, int]) -> None:
    result = loaded(tmp_path, f"dados.resolucao={written}")
    assert result.config.data.resolution == sides
    assert len(result.notices) == 1
    assert f"arredondado para {sides[0]}x{sides[1]} (múltiplos de 64)" in result.notices[0]
    assert "arredondado de" in result.origins["dados.resolucao"]


@pytest.mark.parametrize("written", ["512", "512x768", "[512, 768]", "'512,768'", "1024X1024", "512.0"])
def test_d02_fitting_sizes_are_left_alone(tmp_path: Path, written: str) -> None:
    assert loaded(tmp_path, f"dados.resolucao={written}").notices == []


@pytest.mark.parametrize("written", ["63", "0", "-512", "512x0", "[512, -1]"])
def test_d02_too_small(tmp_path: Path, written: str) -> None:
    assert "`resolucao`: esperava lados de pelo menos 64 pixels" in problems(tmp_path, f"dados.resolucao={written}")


@pytest.mark.parametrize("written", ["alta", "512x", "512x512x3", "512.5", "[512, a]", "true", "[]"])
def test_d02_not_a_size(tmp_path: Path, written: str) -> None:
    assert "esperava 512, 512x768 ou [512, 768]" in problems(tmp_path, f"dados.resolucao={written}")


def test_d02_bucket_step_and_sample_sizes(tmp_path: Path) -> None:
    result = loaded(tmp_path, "dados.passo_bucket=8", "amostras.resolucao=1000x1003", "amostras.prompts=x")
    assert result.config.data.bucket_step == 64
    assert result.config.samples.resolution == (992, 992)
    assert len(result.notices) == 2
    assert loaded(tmp_path, "amostras.resolucao=1024x1088").notices == []


def test_every_family_can_draw_a_rounded_preview() -> None:
    """1080 is no multiple of a token of FLUX: the plan of the preview, and every preview, failed."""
    families = [family_class(name) for name in plugins.available("lora_trainer.families")]
    assert {notices.SAMPLE_MULTIPLE % f.side_multiple for f in families if issubclass(f, TransformerFamily)} == {0}


@pytest.mark.parametrize(
    ("side", "multiple", "fitting"),
    [(64, 64, 64), (96, 64, 64), (97, 64, 128), (65, 64, 64), (1, 8, 8), (1004, 8, 1000)],
)
def test_nearest_multiple(side: int, multiple: int, fitting: int) -> None:
    assert notices.nearest_multiple(side, multiple) == fitting


# -- H05
CONTRADICTIONS = [
    (("dados.cache_codificador_texto=sim", "modelo.treinar_codificador_texto=sim"), "não andam juntos"),
    (("treino.estimativa_sem_vies=sim", "treino.min_snr_gamma=5"), "dão pesos diferentes à mesma perda"),
    (("treino.passo_ruido_minimo=500", "treino.timestep_max=500"), "(500) precisa ser menor que"),
    (("treino.use_otimizador_8bit=sim", "treino.otimizador=prodigy"), "`prodigy` não tem versão de 8 bits"),
    (("dados.diretorio_mascaras=.", "dados.mascara=alfa"), "pede `dados.mascara: arquivos`"),
    (("treino.snr_terminal_zero=sim", "modelo.tipo_predicao=eps"), "só funciona com predição v"),
    (("memoria.descarga_otimizador=sim", "treino.otimizador=prodigy"), "usa uma estimativa comum a todos os pesos"),
]


@pytest.mark.parametrize(("settings", "expected"), CONTRADICTIONS)
def test_h05_contradictions_name_both_keys(tmp_path: Path, settings: tuple[str, str], expected: str) -> None:
    text = problems(tmp_path, *settings)
    assert expected in text
    for setting in settings:
        assert f" > | {setting}" in text
    assert "e também linha de comando" in text
    assert "1 problema" in text
    loaded(tmp_path, settings[0] if "mascaras" not in settings[0] else settings[1])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("treino.otimizador=schedulefree_adamw", "usa uma estimativa comum a todos os pesos"),
        ("treino.precisao_mista=fp16", "um passo com estouro não poderia ser refeito"),
    ],
)
def test_h05_what_cannot_step_in_the_backward_pass(tmp_path: Path, setting: str, expected: str) -> None:
    in_backward = ("memoria.otimizador_no_backward=sim", "treino.norma_maxima_gradiente=0")
    text = problems(tmp_path, *in_backward, setting)
    assert expected in text
    assert "e também linha de comando" in text
    loaded(tmp_path, *in_backward)


def test_h05_all_in_one_report_with_other_problems(tmp_path: Path) -> None:
    every = list(dict.fromkeys(setting for settings, _ in CONTRADICTIONS for setting in settings))
    text = problems(tmp_path, *every, "treino.epocas=0", "lr=1")
    assert f"{len(CONTRADICTIONS) + 2} problemas" in text


@pytest.mark.parametrize("other", ["embaralhar_legendas=sim", "descarte_legendas=0.1", "descarte_etiquetas=0.1"])
def test_h05_cache_with_shuffle_or_dropout_is_allowed(tmp_path: Path, other: str) -> None:
    config = loaded(tmp_path, "dados.cache_codificador_texto=sim", f"dados.{other}").config
    assert config.data.cache_text_encoder == "yes"


def test_rules_stay_silent_about_what_already_failed(tmp_path: Path) -> None:
    text = problems(tmp_path, "treino.passo_ruido_minimo=999", "treino.passo_ruido_maximo=0")
    assert "entre 1 e 1000" in text
    assert "1 problema" in text


def test_single_values(tmp_path: Path) -> None:
    text = problems(
        tmp_path,
        "treino.aquecimento=1.5",
        "modelo.familia=sd_xyz",
        "modelo.alvos_lora=to_q(",
        "dados.fundo=azulado",
        "dados.maximo_tokens=77",
        "sistema.dispositivo=gpu",
        "treino.betas=[0.9]",
        "treino.otimizador=adamw8bits",
        "dados.separador=''",
        "amostras.prompts=[~]",
        "saida.formatos=[]",
    )
    for expected in (
        "1.5 não é fração (menos de 1) nem número inteiro de passos",
        "não conheço a família `sd_xyz`",
        "expressão regular inválida",
        "não conheço a cor `azulado`",
        "`dados.maximo_tokens`: 77 não serve para nenhuma família",
        "use auto ou 75, 120,",
        "`dispositivo`: esperava auto, cpu, cuda ou cuda:N, veio `gpu`",
        "`betas`: esperava pelo menos 2 itens na lista, mas há 1",
        "você quis dizer `adamw8bit`?",
        "`separador`: esperava um texto não vazio",
        "`prompts` está sem valor",
        "`formatos`: esperava pelo menos 1",
        "11 problemas",
    ):
        assert expected in text
    assert loaded(tmp_path, "treino.aquecimento=100", "dados.fundo=#00ff00").config.training.lr_warmup == 100


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("modelo.classificacao_conv=4",), "`modelo.classificacao_conv` não tem efeito sem `modelo.alvos_lora: tudo`"),
        (("model.conv_alpha=4",), "`model.conv_alpha` não tem efeito sem `modelo.alvos_lora: tudo`"),
        (("treino.ciclos=3", "training.lr_scheduler=cosine"), "sem `training.lr_scheduler: cosine_restarts`"),
        (("treino.validar_cada=10",), "sem `dados.fracao_validacao`"),
        (("amostras.cada=10",), "sem `amostras.prompts`"),
    ],
)
def test_options_without_effect_are_said(tmp_path: Path, settings: tuple[str, ...], expected: str) -> None:
    result = loaded(tmp_path, *settings)
    assert len(result.notices) == 1
    assert expected in result.notices[0]


def test_conv_rank_with_convolutions_or_a_regex_is_silent(tmp_path: Path) -> None:
    for targets in ("tudo", "all", ".*conv.*"):
        assert loaded(tmp_path, "modelo.classificacao_conv=4", f"modelo.alvos_lora={targets}").notices == []


# -- folders that get in each other's way
@pytest.mark.parametrize("key", ["dados.diretorio_dados", "dados.diretorio_regularizacao", "dados.diretorio_mascaras"])
@pytest.mark.parametrize("place", ["saida/gato", "saida/gato/amostras/fotos"])
def test_inputs_inside_the_runs_own_folder_are_refused(tmp_path: Path, key: str, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    other = [f"saida.diretorio={tmp_path}/saida", "dados.mascara=arquivos"]
    text = problems(tmp_path, f"{key}={tmp_path}/{place}", "saida.nome=gato", *other)
    assert f"`{key}` fica na pasta desta execução" in text
    assert "troque `saida.nome`" in text
    assert loaded(tmp_path, f"{key}={tmp_path}/{place}", "saida.nome=gata", *other)


def test_a_link_into_the_runs_own_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "saida/meu").mkdir(parents=True)
    (tmp_path / "fotos").symlink_to(tmp_path / "saida/meu")
    text = problems(tmp_path, f"dados.diretorio_dados={tmp_path}/fotos", f"saida.diretorio={tmp_path}/saida")
    assert "fica na pasta desta execução" in text


def test_the_lora_of_the_same_name_cannot_be_the_initial_one(tmp_path: Path) -> None:
    (tmp_path / "saida/meu").mkdir(parents=True)
    (tmp_path / "saida/meu/meu.safetensors").touch()
    text = problems(tmp_path, f"modelo.lora_inicial={tmp_path}/saida/meu/meu.safetensors", f"saida.diretorio={tmp_path}/saida")
    assert "`modelo.lora_inicial` fica na pasta desta execução" in text


def test_the_regularization_folder_cannot_be_the_image_folder(tmp_path: Path) -> None:
    (tmp_path / "fotos").mkdir()
    (tmp_path / "classe").symlink_to(tmp_path / "fotos")
    text = problems(tmp_path, f"dados.diretorio_dados={tmp_path}/fotos", f"dados.diretorio_regularizacao={tmp_path}/classe")
    assert "`dados.diretorio_regularizacao` é a mesma pasta que `dados.diretorio_dados`" in text


# -- values
ABSURD = ["treino.epocas=1e12", "treino.passos_maximos=1e18", "dados.resolucao=99999999", "amostras.resolucao=512x20000",
          "treino.decaimento_pesos=1e9", "amostras.semente=99999999999999999999", "modelo.alfa_lora=1e30",
          "saida.manter_ultimos=1e15", "treino.betas=[0.9, 1.5]", "treino.potencia=1e300"]  # fmt: skip


@pytest.mark.parametrize("setting", ABSURD)
def test_absurd_values_are_refused_with_the_limit(tmp_path: Path, setting: str) -> None:
    assert setting.split("=")[0].split(".")[1] in problems(tmp_path, setting)


def test_every_number_has_an_upper_limit() -> None:
    from lora_trainer.config import names

    numbers = [o for o in names.options().values() if o.kind in ("integer", "number") and not o.many]
    assert [o.shown() for o in numbers if not {"le", "lt"} & set(o.limits)] == []


@pytest.mark.parametrize(("written", "value"), [
    ("'False'", False), ("sim", True), ("'nao'", False), ("'0.9'", 0.9), ("'3'", 3), ("'1e-4'", 1e-4), ("texto", "texto"),
    ("['0.5', 'true']", [0.5, True]), ("inf", float("inf")), ("'0x10'", "0x10"), ("1.2.3", "1.2.3"),
])  # fmt: skip
def test_optimizer_arguments_are_what_they_say_even_in_quotes(tmp_path: Path, written: str, value: object) -> None:
    (tmp_path / "a.yaml").write_text(f"{BASE}treino: {{argumentos_otimizador: {{amsgrad: {written}}}}}\n", encoding="utf-8")
    from_file = load(tmp_path / "a.yaml").config.training.optimizer_args["amsgrad"]
    from_line = loaded(tmp_path, f"treino.argumentos_otimizador.amsgrad={written}").config.training.optimizer_args["amsgrad"]
    for got in (from_file, from_line):
        assert got == value
        assert type(got) is type(value)


def test_a_decimal_comma_in_an_optimizer_argument_is_named(tmp_path: Path) -> None:
    assert "use ponto: 0.5" in problems(tmp_path, "treino.argumentos_otimizador.x='0,5'")


def test_the_place_of_an_option_is_known_by_its_name(tmp_path: Path) -> None:
    result = loaded(tmp_path, "treino.epocas=3")
    assert result.located("modelo.modelo_base") == "meu.yaml:1: modelo.modelo_base"
    assert result.located("model.base_model") == "meu.yaml:1: model.base_model"
    assert result.located("modelo.vae") == "modelo.vae"
    assert result.located("x.png") == "x.png"
