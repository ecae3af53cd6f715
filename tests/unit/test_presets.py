"""Shipped presets and examples: valid by themselves, in their place between defaults and the user's file."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.original_checkpoint import write_single_file

from lora_trainer import cli, plugins
from lora_trainer.config import effective, presets
from lora_trainer.config.loading import Loaded, load
from lora_trainer.errors import ErrorReport, SourceError
from lora_trainer.families import family_class
from lora_trainer.files import arch
from lora_trainer.planner.picker import preset_budget
from lora_trainer.planner.presets import Predicted, write_peaks

ROOT = Path(__file__).parents[2]
FAMILIES = tuple(plugins.available("lora_trainer.families"))
SHAPES = {name: sizes for name in FAMILIES if (sizes := family_class(name).sizes)}
IMAGES = tuple(name for name in FAMILIES if name != "causal_lm")
TRAINED = {
    "sd15": (4, (512, 512), 2048), "sdxl": (4, (1024, 1024), 2048), "sd3": (4, (1024, 1024), 2048),
    "flux": (4, (512, 512), 2048), "flux2": (4, (1024, 1024), 2048), "chroma": (4, (512, 512), 2048),
    "z_image": (4, (1024, 1024), 2048), "qwen_image": (4, (1024, 1024), 2048),
    "qwen_image_21": (4, (1024, 1024), 2048), "causal_lm": (16, (512, 512), 2048),
}  # fmt: skip
"""Effective batch, resolution, length."""
USUAL = (4, (1024, 1024), 2048)
"""What a family trains that is not named."""
BITS = {
    "flux": {"nf4", "int8"}, "chroma": {"nf4", "int8"}, "flux2": {"nf4", "int8", "no"}, "z_image": {"nf4", "int8", "no"},
    "qwen_image": {"nf4"}, "qwen_image_21": {"nf4", "int8", "no"},
}  # fmt: skip
"""Of the base, where 16 would not do."""
OFFLOAD = ("memory", "activation_offload")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fotos").mkdir()
    return tmp_path


def write(folder: Path, text: str, name: str = "meu.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mine(folder: Path, text: str = "", family: str = "sdxl", preset: str = "8gb") -> Loaded:
    model = f"modelo: {{modelo_base: dono/modelo, familia: {family}}}\ndados:\n  diretorio_dados: fotos\n"
    return load(write(folder, model + text), [f"memoria.preset={preset}"] if preset else [])


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ErrorReport) as caught:
        load(path, overrides, required=())
    return str(caught.value)


def base_of(family: str) -> str:
    """Where the base's size counts, one that is there."""
    if family not in SHAPES:
        return "dono/modelo"
    return str(arch.folder(next(iter(SHAPES[family].values()))))


# -- the shipped files


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_config_by_itself(name: str, family: str, folder: Path) -> None:
    arguments = [f"modelo.modelo_base={base_of(family)}", f"dados.diretorio_dados={folder}", f"modelo.familia={family}"]
    loaded = load(presets.path_of(name), arguments)
    assert loaded.notices == []
    assert (loaded.preset, loaded.family) == (name, family)
    assert loaded.config.memory.preset == name
    size = "resolucao" if family in IMAGES else "comprimento_maximo"
    assert loaded.origins[f"dados.{size}"].startswith(f"{name}.yaml:")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_presets_of_a_family_train_the_same_thing(family: str) -> None:
    """Results stay comparable: same effective batch, resolution or length, rank and, but for large bases, bits."""
    seen, stored = set(), set()
    for name in presets.names():
        config = load(None, [f"modelo.familia={family}", f"memoria.preset={name}"], required=()).config
        batch = config.training.batch_size * config.training.gradient_accumulation_steps
        data, bits = config.data, config.memory.base_quantization
        seen.add((batch, data.resolution, data.max_length, config.model.lora_rank))
        stored.add(bits)
    assert seen == {(*TRAINED.get(family, USUAL), 16)}
    assert stored == BITS.get(family, {"no"} if family in TRAINED else stored)


@pytest.mark.parametrize(("family", "shape"), [(family, shape) for family, s in SHAPES.items() for shape in s.values()])
def test_all_sizes_of_a_family_train_the_same_thing(family: str, shape: str) -> None:
    """But for the base's bits: the larger the card, the more."""
    bits, batches = [], set()
    for name in presets.names():
        config = load(None, [f"modelo.arquitetura={shape}", f"memoria.preset={name}"], required=()).config
        batches.add(config.training.batch_size * config.training.gradient_accumulation_steps)
        bits.append(config.memory.base_quantization)
    assert batches == {TRAINED.get(family, USUAL)[0]}
    order = ("nf4", "int8", "no")
    assert bits == sorted(bits, key=order.index)
    assert bits[0] == ("no" if shape in ("qwen3-1.7b", "qwen3-4b", "sd3") else "nf4")


@pytest.mark.parametrize("name", presets.names())
def test_every_family_has_its_section_and_its_peak_line(name: str) -> None:
    text = presets.path_of(name).read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"\n  {family}:" in text
    peaks = re.findall(r"# pico simulado: \d+\.\d\d GiB com o contexto CUDA; sobram \d", text)
    plain, sized = len(FAMILIES) - len(SHAPES), sum(map(len, SHAPES.values()))
    assert len(peaks) == plain + len(re.findall(r"^      \d+b:", text, re.MULTILINE))
    assert len(peaks) >= plain + sized - 2 * (name == "4gb")  # which holds neither of the 32B models
    assert f"{preset_budget(name) / 2**30:.1f} GiB" in text


@pytest.mark.parametrize("family", IMAGES)
def test_shipped_examples_load(family: str, folder: Path) -> None:
    arguments = [f"modelo.modelo_base={base_of(family)}", f"dados.diretorio_dados={folder}", f"saida.diretorio={folder}/s"]
    loaded = load(ROOT / "configs" / f"{family}.yaml", [*arguments, f"modelo.familia={family}"])
    assert loaded.notices == []
    assert loaded.preset is None
    with_preset = loaded.with_preset("4gb")
    assert with_preset.config.training.gradient_accumulation_steps == 4
    assert with_preset.config.memory.preset == "auto"  # the example's own word


@pytest.mark.parametrize("family", IMAGES)
def test_what_the_examples_comment_out_is_valid_too(family: str, folder: Path) -> None:
    """Each commented option, switched on, is known and has a valid value (its path apart)."""
    lines = (ROOT / "configs" / f"{family}.yaml").read_text(encoding="utf-8").splitlines()
    switched = [line.replace("# ", "", 1) if line.startswith("  # ") else line for line in lines]
    files = re.compile(r"vae:|validacao|codificador_texto(_\d)?:|lora_de_treino:|modelo_base: .*#.*bf16")
    text = "\n".join(line for line in switched if not files.search(line) or "treinar_" in line)
    path = write(folder, text)
    arguments = ["modelo.modelo_base=dono/modelo", f"dados.diretorio_dados={folder}", f"modelo.familia={family}"]
    assert load(path, arguments).config.training.batch_size == 1


# -- where a preset lies


def test_the_file_and_the_command_line_are_stronger(folder: Path) -> None:
    loaded = mine(folder, "  resolucao: 768\nmemoria: {streaming_blocos: 0.5}\n")
    assert loaded.config.data.resolution == (768, 768)
    assert loaded.config.memory.block_streaming == 0.5
    assert loaded.config.memory.base_quantization == "no"
    assert loaded.origins["dados.resolucao"] == "meu.yaml:4"
    assert loaded.origins["memoria.quantizacao_base"].startswith("8gb.yaml:")
    assert loaded.origins["treino.epocas"] == "padrão"
    assert ("data", "resolution") in loaded.written
    assert ("memory", "base_quantization") not in loaded.written


def test_half_an_effective_batch_is_never_the_presets(folder: Path) -> None:
    loaded = mine(folder, "  tamanho_lote: 2\n")
    assert (loaded.config.training.batch_size, loaded.config.training.gradient_accumulation_steps) == (2, 1)
    loaded = mine(folder, "  passos_acumulacao_gradiente: 3\n", preset="24gb")
    assert (loaded.config.training.batch_size, loaded.config.training.gradient_accumulation_steps) == (1, 3)
    loaded = mine(folder)
    assert (loaded.config.training.batch_size, loaded.config.training.gradient_accumulation_steps) == (1, 4)


def test_a_preset_never_contradicts_what_the_user_wrote(folder: Path) -> None:
    """Streaming needs checkpointing: whoever switches the latter off gets no error about a file not their own."""
    config = mine(folder, "treino: {checkpoint_gradiente: nao, otimizador: prodigy}\n", preset="4gb").config
    assert config.training.gradient_checkpointing == "no"
    assert config.memory.block_streaming == "auto"
    text = "treino: {norma_maxima_gradiente: 0}\nmemoria: {otimizador_no_backward: sim}\n"
    assert mine(folder, text, preset="4gb").config.training.gradient_accumulation_steps == 1


def test_the_base_tells_the_family(folder: Path) -> None:
    text = "modelo: {modelo_base: base.safetensors}\ndados: {diretorio_dados: fotos}\nmemoria: {preset: 4gb}\n"
    for release, family, resolution in (("sd1", "sd15", 512), ("sd2", "sd15", 512), ("sdxl", "sdxl", 1024)):
        write_single_file(folder / "base.safetensors", release)
        loaded = load(write(folder, text))
        assert (loaded.family, loaded.config.data.resolution) == (family, (resolution, resolution))


def test_a_broken_base_is_told_when_it_must_be_read(folder: Path) -> None:
    (folder / "base.safetensors").touch()
    text = "modelo: {modelo_base: base.safetensors}\ndados: {diretorio_dados: fotos}\n"
    assert load(write(folder, text)).family is None  # nothing asks for it
    with pytest.raises(SourceError):
        load(write(folder, text), ["memoria.preset=8gb"])


def test_presets_and_families_are_torch_free(folder: Path) -> None:
    from test_cli import run_python

    write(folder, "modelo: {modelo_base: a/b, familia: sdxl}\ndados: {diretorio_dados: fotos}\n")
    code = (
        "import sys; from lora_trainer.config.loading import load; "
        "print(load('meu.yaml', ['memoria.preset=8gb']).config.data.resolution, 'torch' in sys.modules)"
    )
    assert run_python(code, cwd=folder).stdout == "(1024, 1024) False\n"


def test_no_preset_and_preset_words(folder: Path) -> None:
    assert mine(folder, preset="nenhum").preset is None
    assert mine(folder, preset="").config.memory.preset == "auto"
    assert mine(folder, preset="").config.training.gradient_accumulation_steps == 1
    assert "4gb, 6gb, 8gb, 12gb, 24gb" in problems(folder / "meu.yaml", "memoria.preset=10gb")


def test_the_effective_config_keeps_the_preset_and_loads_alike(folder: Path) -> None:
    loaded = mine(folder, preset="").with_preset("4gb")
    assert loaded.config.memory.preset == "4gb"
    target = folder / "fora" / "config.yaml"
    effective.write(loaded, target)
    assert 'preset: "4gb"  # 4gb.yaml:' in target.read_text(encoding="utf-8")
    again = load(target)
    assert (again.config, again.preset) == (loaded.config, "4gb")


# -- families: in any file


def test_family_sections_work_in_the_users_own_file(folder: Path) -> None:
    text = "treino: {epocas: 1, potencia: 2}\nfamilies:\n  sd15: {treino: {epocas: 2}}\n  sdxl:\n    training: {epochs: 3}\n"
    for family, epochs in (("sd15", 2), ("sdxl", 3)):
        loaded = mine(folder, text, family, preset="")
        assert loaded.config.training.epochs == epochs
        assert loaded.config.training.lr_power == 2
    assert loaded.origins["treino.epocas"] == "meu.yaml:8"
    assert load(folder / "meu.yaml", ["treino.epocas=9"]).config.training.epochs == 9


def test_sizes_of_a_family_go_by_the_bases_parameters(folder: Path) -> None:
    text = "familias:\n  causal_lm:\n    treino: {epocas: 2}\n    tamanhos:\n"
    text += "      10b: {treino: {epocas: 4}}\n      1.5b: {training: {epochs: 3}}\n"
    path = write(folder, text)
    for shape, epochs in (("llama-3.2-1b", 3), ("qwen3-1.7b", 4), ("llama-3.1-8b", 4), ("qwen3-14b", 4)):
        loaded = load(path, [f"modelo.arquitetura={shape}"], required=())
        assert loaded.config.training.epochs == epochs, shape
    assert loaded.origins["treino.epocas"] == "meu.yaml:5"
    assert load(path, ["modelo.familia=causal_lm"], required=()).config.training.epochs == 2  # of no known size
    assert load(path, ["modelo.familia=causal_lm", "treino.epocas=9"], required=()).config.training.epochs == 9


@pytest.mark.parametrize(
    ("family", "release", "count"),
    [("flux2", "flux2", 3.88), ("flux2", "flux2_dev", 32.2), ("sd3", "sd3", 2.24), ("sd3", "sd3_large", 8.06)],
)
def test_parameters_of_a_transformer_alone(family: str, release: str, count: float) -> None:
    assert presets.size_of(str(arch.folder(release)), family) == pytest.approx(count, rel=0.01)


def test_what_encodes_for_a_transformer_does_not_count(tmp_path: Path) -> None:
    from helpers.bases import written

    for name, kind in (("flux", "all_in_one"), ("flux", "folder"), ("flux", "fp8"), ("flux", "gguf")):
        options, modules = written(name, kind)
        real = sum(p.numel() for p in modules["transformer"].parameters()) / 1e9
        assert presets.size_of(options["base_model"]) == pytest.approx(real, rel=0.01), kind


def test_parameters_are_counted_without_torch(folder: Path) -> None:
    from helpers.gguf_files import tiny_model, write_model
    from tiny_language_models import save_tiny

    model = save_tiny(folder / "m", "llama_tied", shard_bytes=50_000)
    real = sum(p.numel() for p in model.parameters()) / 1e9
    assert presets.size_of(str(folder / "m")) == pytest.approx(real)
    for path in (folder / "m").glob("*.safetensors*"):
        path.unlink()
    assert presets.size_of(str(folder / "m")) == pytest.approx(real, rel=0.02)  # its config alone
    other = tiny_model("qwen3moe")
    gguf = write_model(folder / "base.gguf", other, "qwen3moe", "Q8_0")
    assert presets.size_of(str(gguf)) == pytest.approx(sum(p.numel() for p in other.parameters()) / 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("familias: {sd16: {treino: {epocas: 1}}}", "não conheço a família `sd16`"),
        ("familias: {sd15: {treino: {epoca: 1}}}", "você quis dizer `epocas`?"),
        ("familias: {sd15: {trieno: {epocas: 1}}}", "chave desconhecida `trieno`"),
        ("familias: [sd15]", "espera famílias com suas seções abaixo"),
        ("familias: {sd15: {treino: {epocas: 1, epochs: 2}}}", "são a mesma opção"),
        ("familias: {causal_lm: {tamanhos: {grande: {treino: {epocas: 1}}}}}", "espera tamanhos em bilhões"),
        ("familias: {causal_lm: {tamanhos: {}}}", "espera tamanhos em bilhões"),
        ("familias: {causal_lm: {tamanhos: {4b: {treino: {epoca: 1}}}}}", "você quis dizer `epocas`?"),
        ("familias: {causal_lm: {tamanhos: {4b: {tamanhos: {2b: {}}}}}}", "chave desconhecida `tamanhos`"),
    ],
)
def test_what_is_wrong_in_a_family_section_is_told(text: str, expected: str, folder: Path) -> None:
    assert expected in problems(write(folder, text))


def test_a_wrong_value_in_the_bases_family_section_is_told(folder: Path) -> None:
    path = write(folder, "modelo: {familia: sdxl}\nfamilias: {sdxl: {treino: {epocas: 0}}}")
    assert "`epocas`: esperava um valor entre 1 e 1000000, veio `0`" in problems(path)


# -- the new options


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("nao", "no"),
        ("0", "no"),
        ("0.0", "no"),
        ("false", "no"),
        ("auto", "auto"),
        ("0.25", 0.25),
        ("1", 1.0),
        ("sim", 1.0),
    ],
)
def test_block_streaming_is_a_share_or_a_word(written: str, value: object, folder: Path) -> None:
    assert load(None, [f"memoria.streaming_blocos={written}"], required=()).config.memory.block_streaming == value


@pytest.mark.parametrize("written", ["1.5", "-1", "metade", "0,5", "[1, 2]"])
def test_block_streaming_refuses(written: str, folder: Path) -> None:
    text = problems(write(folder, f"memoria: {{streaming_blocos: '{written}'}}"))
    assert "auto, nao ou um número de 0 a 1" in text or "use ponto: 0.5" in text


@pytest.mark.parametrize(("written", "value"), [("true", "yes"), ("false", "no"), ("auto", "auto"), ("sim", "yes")])
def test_what_was_a_boolean_takes_auto_too(written: str, value: str, folder: Path) -> None:
    text = f"treino: {{checkpoint_gradiente: {written}, use_otimizador_8bit: {written}}}\nmemoria: {{preset: nenhum}}"
    training = load(write(folder, text), required=()).config.training
    assert (training.gradient_checkpointing, training.use_8bit_optimizer) == (value, value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memoria: {streaming_blocos: 0.5}\ntreino: {checkpoint_gradiente: nao}", "`memoria.streaming_blocos` precisa de"),
        ("memoria: {otimizador_no_backward: sim}\ntreino: {norma_maxima_gradiente: 0, tamanho_lote: 1,"
         " passos_acumulacao_gradiente: 2}", "maior que 1"),
        ("memoria: {otimizador_no_backward: sim}", "corte de gradiente"),
        ("memoria: {vram: 0}", "um valor maior que 0"),
        ("memoria: {blocks_to_swap: 4}", "aqui esta opção se chama `memoria.streaming_blocos`"),
    ],
)  # fmt: skip
def test_contradictions_and_hints(text: str, expected: str, folder: Path) -> None:
    assert expected in problems(write(folder, text))


# -- the command and the comment lines


def test_the_command_shows_all_families_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "sistema.dispositivo=cpu"]) == 0
    said = capsys.readouterr().out
    for word in ("família sd15", "família sdxl", "streaming_blocos", "24gb", "aqui: sem preset: treino na CPU"):
        assert word in said


def test_the_command_predicts_and_answers_in_json(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(folder / "cache"))
    write_single_file(folder / "base.safetensors", "sd1")
    text = "modelo: {modelo_base: base.safetensors}\ntreino: {tamanho_lote: 3}\nsistema: {dispositivo: cpu}\n"
    assert cli.main(["presets", "--config", str(write(folder, text)), "--vram", "6", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"] == "6gb"
    rows = {row["preset"]: row for row in answer["families"]["sd15"]}
    assert list(rows) == list(presets.names())
    assert {row["settings"]["training.batch_size"] for row in rows.values()} == {3}
    assert {row["settings"]["memory.block_streaming"] for row in rows.values()} == {"no"}  # solved, not `auto`
    assert all(row["fits"] and 0 < row["peak_gib"] < row["budget_gib"] for row in rows.values())
    assert rows["24gb"]["seconds_per_step"] < rows["4gb"]["seconds_per_step"]
    assert cli.main(["presets", "--config", str(folder / "meu.yaml")]) == 0
    said = capsys.readouterr().out
    assert "pico previsto" in said
    assert "por passo" in said


def test_flags_stand_for_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, "modelo: {familia: sd15}\n")
    assert cli.main(["presets", "--config", str(path), "--vram", "muita"]) == 2
    assert "memoria.vram=muita" in capsys.readouterr().err
    assert cli.main(["presets", "--config", str(path), "--preset", "9gb"]) == 2
    assert "você quis dizer" in capsys.readouterr().err


def test_peak_lines_are_rewritten(tmp_path: Path) -> None:
    for name in presets.names():
        (tmp_path / f"{name}.yaml").write_text(presets.path_of(name).read_text(encoding="utf-8"), encoding="utf-8")
    before = (tmp_path / "8gb.yaml").read_text(encoding="utf-8")
    write_peaks(lambda loaded: None, tmp_path)
    assert (tmp_path / "8gb.yaml").read_text(encoding="utf-8") == before
    peaks = {(512, 512): 2 * 2**30, (1024, 1024): 6 * 2**30}
    solved = {("training", "gradient_checkpointing"): "yes", ("memory", "block_streaming"): 0.7, OFFLOAD: "no"}
    for _ in range(2):
        write_peaks(
            lambda loaded: Predicted(
                peaks[loaded.config.data.resolution], values=solved if loaded.config.data.resolution[0] > 512 else {}
            ),
            tmp_path,
        )
    text = (tmp_path / "8gb.yaml").read_text(encoding="utf-8")
    assert "    # pico simulado: 2.00 GiB com o contexto CUDA; sobram 4.72 GiB\n" in text
    assert "    # pico simulado: 6.00 GiB com o contexto CUDA; sobram 0.72 GiB; checkpoint_gradiente: sim, " \
        "streaming_blocos: 0.7\n" in text
    assert len(list(tmp_path.iterdir())) == len(presets.names())


def test_peak_lines_of_one_family_are_rewritten_alone(tmp_path: Path) -> None:
    for name in presets.names():
        shutil.copy(presets.path_of(name), tmp_path)
    before = (tmp_path / "8gb.yaml").read_text(encoding="utf-8").splitlines()
    write_peaks(lambda loaded: Predicted(3 * 2**30), tmp_path, ["sdxl"])
    after = (tmp_path / "8gb.yaml").read_text(encoding="utf-8").splitlines()
    changed = [number for number, line in enumerate(after) if line != before[number]]
    assert [after[number - 1].strip() for number in changed] == ["sdxl:   # SDXL"]
