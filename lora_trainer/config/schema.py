"""Every option there is, declared once. Sections are handed to the part of the program that needs them, never all.

Below each option: what it is, in both languages, for people (hints of errors, JSON Schema).
"""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..choices import words
from ..choices.losses import LOSSES, WEIGHTINGS
from ..choices.noise_levels import SAMPLINGS
from ..choices.optimizers import OPTIMIZERS
from ..choices.schedules import SCHEDULES
from . import declared
from .fields import (
    MAX_SIDE,
    Boolean,
    Folder,
    Free,
    Integer,
    LocalPath,
    Number,
    OutputFolder,
    PathOrHub,
    Resolution,
    Rules,
    Section,
    Switch,
    Text,
    Tokens,
    option,
    section,
)

MAX_STEPS = 1_000_000_000
"""No run is longer; a larger number is a slip of the finger."""

if TYPE_CHECKING:  # which cannot know what is read off rows
    OptimizerName: TypeAlias = str
    ScheduleName: TypeAlias = str
    LossName: TypeAlias = str
    WeightingName: TypeAlias = str
    SamplingName: TypeAlias = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ScheduleName = Literal[tuple(SCHEDULES)]
    LossName = Literal[tuple(LOSSES)]
    WeightingName = Literal[tuple(WEIGHTINGS)]
    _with_auto = ("auto", *SAMPLINGS)
    SamplingName = Literal[_with_auto]


class _Assembled(Section):
    """A section to which techniques add their options."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class ModelConfig(Section):
    base_model: PathOrHub | None = option(
        None, pt="modelo_base",
        elsewhere="pretrained_model_name_or_path model_name_or_path base_model_name name_or_path checkpoint")
    """pt: Modelo base: arquivo .safetensors, pasta do diffusers ou id do Hugging Face.
    en: Base model: .safetensors file, diffusers folder or Hugging Face id."""
    family: Text = option("auto", pt="familia")
    """pt: Família do modelo; auto reconhece pelo cabeçalho do arquivo.
    en: Model family; auto recognises it from the file's header."""
    vae: PathOrHub | None = option(None, pt="vae")
    """pt: VAE separado: arquivo ou pasta.
    en: Separate VAE: file or folder."""
    text_encoder: PathOrHub | None = option(None, pt="codificador_texto")
    """pt: Codificador de texto separado, como no ComfyUI: clip_l (FLUX, SD3), qwen… Arquivo ou pasta.
    en: Separate text encoder, as for ComfyUI: clip_l (FLUX, SD3), qwen… File or folder."""
    text_encoder_2: PathOrHub | None = option(None, pt="codificador_texto_2")
    """pt: Segundo codificador de texto: t5xxl (FLUX) ou clip_g (SD3). Arquivo ou pasta.
    en: Second text encoder: t5xxl (FLUX) or clip_g (SD3). File or folder."""
    text_encoder_3: PathOrHub | None = option(None, pt="codificador_texto_3")
    """pt: Terceiro codificador de texto: t5xxl (SD3). Arquivo ou pasta.
    en: Third text encoder: t5xxl (SD3). File or folder."""
    tokenizer: Folder | None = option(None, pt="tokenizador")
    """pt: Pasta do tokenizador (ou com as subpastas tokenizer, tokenizer_2), quando o modelo base não o traz.
    en: Folder of the tokenizer (or with sub-folders tokenizer, tokenizer_2), when the base brings none."""
    architecture: Folder | None = option(None, pt="arquitetura")
    """pt: Pasta com config.json no formato diffusers, para arquivos únicos de tamanho fora do comum.
    en: Folder with diffusers config.json files, for single files of an unusual size."""
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = option(
        "auto", pt="tipo_predicao", words={"v": "v_prediction", "eps": "epsilon"}, elsewhere="v_parameterization")
    """pt: O que o modelo prevê; auto lê do arquivo quando ele diz.
    en: What the model predicts; auto reads it from the file where it tells."""
    clip_skip: Integer = option(1, pt="pular_clip", ge=1, le=12)
    """pt: Camada do CLIP contada do fim (1 = última, 2 = penúltima). Só SD 1.x.
    en: CLIP layer counted from the end (1 = last, 2 = penultimate). SD 1.x only."""
    adapter_kind: Literal["lora", "loha", "lokr"] = option("lora", pt="tipo_adaptador", elsewhere="algo network_type")
    """pt: O que se treina sobre cada camada: lora; ou loha e lokr (LyCORIS), só em modelos de imagem.
    en: What is trained on each layer: lora; or loha and lokr (LyCORIS), in image models only."""
    lora_rank: Integer = option(
        16, pt="classificacao_lora", ge=1, le=1024, elsewhere="network_dim rank lora_r r linear")
    """pt: Rank (posto) do LoRA.
    en: Rank of the LoRA."""
    lora_alpha: Number | None = option(
        None, pt="alfa_lora", gt=0, le=1_000_000, elsewhere="network_alpha alpha linear_alpha")
    """pt: Alfa do LoRA; a força é alfa/rank. Sem valor: igual ao rank.
    en: Alpha of the LoRA; its strength is alpha/rank. Unset: equal to the rank."""
    lora_dropout: Number = option(0.0, pt="dropout_lora", ge=0, lt=1, elsewhere="network_dropout")
    """pt: Dropout na entrada do LoRA.
    en: Dropout on the LoRA's input."""
    lora_targets: Text = option(
        "auto", pt="alvos_lora", words={"atencao": "attention", "atencao+mlp": "attention+mlp", "tudo": "all"},
        elsewhere="target_modules lora_target")
    """pt: Camadas com LoRA: auto (atencao nos modelos de imagem, tudo nos de linguagem), atencao, atencao+mlp, tudo
    (com convoluções) ou uma expressão regular.
    en: Layers with LoRA: auto (attention in image models, all in language models), attention, attention+mlp, all
    (with convolutions) or a regular expression."""
    conv_rank: Integer | None = option(None, pt="classificacao_conv", ge=1, le=1024, elsewhere="conv_dim")
    """pt: Rank nas convoluções 3x3. Sem valor: o mesmo.
    en: Rank in 3x3 convolutions. Unset: the same."""
    conv_alpha: Number | None = option(None, pt="alfa_conv", gt=0, le=1_000_000)
    """pt: Alfa nas convoluções 3x3. Sem valor: mesma força das outras camadas.
    en: Alpha in 3x3 convolutions. Unset: the same strength as elsewhere."""
    rslora: Boolean = option(False, pt="rslora", elsewhere="use_rslora")
    """pt: Força alfa/raiz(rank) (rsLoRA).
    en: Strength alpha/sqrt(rank) (rsLoRA)."""
    dora: Boolean = option(False, pt="dora", elsewhere="use_dora")
    """pt: Decompõe direção e magnitude (DoRA).
    en: Weight-decomposed LoRA (DoRA)."""
    lokr_factor: Integer | None = option(None, pt="fator_lokr", ge=2, le=1024, elsewhere="decompose_factor")
    """pt: LoKr: tamanho da primeira matriz (4, 8 ou 16 são usuais; menor guarda mais). Sem valor: perto da raiz.
    en: LoKr: size of the first matrix (4, 8 or 16 are usual; smaller holds more). Unset: near the square root."""
    lora_init: Literal["default", "pissa"] = option(
        "default", pt="inicializacao_lora", words={"padrao": "default", "padrão": "default"},
        elsewhere="init_lora_weights")
    """pt: Como o LoRA começa: padrao (B = 0), ou pissa (as componentes principais do modelo base; o arquivo final tem o
    dobro do rank).
    en: How the LoRA starts: default (B = 0), or pissa (the base's principal components; the final file has twice the
    rank)."""
    lora_rules: Rules = option([], pt="regras_lora", elsewhere="rank_pattern")
    """pt: Rank, alfa ou taxa de aprendizado de algumas das camadas, por expressão regular: [{alvo: 'attn2', rank: 32,
    alfa: 16, taxa: 5e-5}]. De cada um, vale a primeira regra que combina e o diz.
    en: Rank, alpha or learning rate of some of the layers, by regular expression: [{target: 'attn2', rank: 32,
    alpha: 16, rate: 5e-5}]. Of each, the first rule that matches and says it counts."""
    train_text_encoder: Boolean = option(False, pt="treinar_codificador_texto")
    """pt: Treina também um LoRA nos codificadores de texto.
    en: Also train a LoRA on the text encoders."""
    initial_lora: LocalPath | None = option(None, pt="lora_inicial", elsewhere="network_weights")
    """pt: Arquivo LoRA de onde continuar (mesmo rank e alvos).
    en: LoRA file to continue from (same rank and targets)."""
    training_lora: LocalPath | None = option(None, pt="lora_de_treino")
    """pt: LoRA que o modelo base usa só no treino, como o adaptador de treino do Z-Image Turbo; fora do arquivo final.
    en: LoRA that the base wears while training only, such as Z-Image Turbo's training adapter; not in the final
    file."""

    @property
    def base_or_architecture(self) -> str | None:
        """For planning, which config files tell as much as a whole base."""
        return self.base_model or self.architecture


class DataConfig(Section):
    data_dir: LocalPath | None = option(
        None, pt="diretorio_dados", elsewhere="train_data_dir instance_data_dir image_dir folder_path dataset")
    """pt: Pasta das imagens: simples, com subpastas, ou no formato `10_nome` do kohya. Ou os textos: arquivo .jsonl,
    .json, .csv, .parquet, ou pasta.
    en: Image folder: plain, with sub-folders, or in kohya's `10_name` form. Or the texts: a .jsonl, .json, .csv or
    .parquet file, or a folder."""
    resolution: Resolution = option((512, 512), pt="resolucao", elsewhere="max_resolution")
    """pt: Resolução de treino: 512, 512x768 ou [512, 768]; define a área dos buckets.
    en: Training resolution: 512, 512x768 or [512, 768]; sets the area of the buckets."""
    recursive: Boolean = option(True, pt="recursivo")
    """pt: Lê subpastas.
    en: Read sub-folders."""
    repeats: Integer | None = option(None, pt="repeticoes", ge=1, le=10000, elsewhere="num_repeats")
    """pt: Vezes que cada imagem aparece por época. Sem valor: do nome `N_` da pasta, ou 1.
    en: Times each image appears per epoch. Unset: from the folder's `N_` name, or 1."""
    trigger: Text | None = option(None, pt="palavra_gatilho", elsewhere="instance_prompt trigger_word")
    """pt: Palavra que ativa o LoRA: entra no começo das legendas e substitui [trigger].
    en: Word that activates the LoRA: put at the start of captions, replaces [trigger]."""
    caption_column: Text | None = option(None, pt="coluna_legenda")
    """pt: Coluna da legenda em metadata.jsonl ou .csv.
    en: Caption column in metadata.jsonl or .csv."""
    uncaptioned: Literal["use", "skip", "stop"] = option(
        "use", pt="sem_legenda", words={"usar": "use", "pular": "skip", "parar": "stop"})
    """pt: Imagem sem legenda: usar, pular ou parar.
    en: Image without caption: use, skip or stop."""
    bad_images: Literal["stop", "skip"] = option("stop", pt="imagens_ruins", words={"parar": "stop", "pular": "skip"})
    """pt: Imagem ilegível: parar ou pular.
    en: Unreadable image: stop or skip."""
    min_side: Integer = option(64, pt="lado_minimo", ge=1, le=MAX_SIDE)
    """pt: Lado menor que isto: imagem deixada de fora, pelo nome.
    en: A side below this: image left out, by name."""
    max_pixels: Integer = option(178_000_000, pt="pixels_maximos", ge=4096, le=10_000_000_000)
    """pt: Imagem maior que isto é tratada como ruim.
    en: A larger image counts as bad."""
    buckets: Boolean = option(True, pt="usar_buckets", elsewhere="enable_bucket")
    """pt: Agrupa por proporção; desligado, corta tudo na resolução.
    en: Group by aspect ratio; off, everything is cropped to the resolution."""
    bucket_step: Integer = option(64, pt="passo_bucket", ge=8, le=512, multiple_of=8, elsewhere="bucket_reso_steps")
    """pt: Lados dos buckets são múltiplos disto.
    en: Bucket sides are multiples of this."""
    upscale: Boolean = option(False, pt="ampliar")
    """pt: Amplia imagens pequenas.
    en: Enlarge small images."""
    flip: Boolean = option(False, pt="espelhar", elsewhere="flip_aug random_flip")
    """pt: Espelha na horizontal, ao acaso (duas versões no cache).
    en: Mirror at random (two versions in the cache)."""
    crop: Literal["center", "random"] = option("center", pt="corte", words={"centro": "center", "aleatorio": "random"})
    """pt: Corte: centro ou aleatorio.
    en: Crop: center or random."""
    crop_variants: Integer = option(4, pt="variantes_corte", ge=1, le=64)
    """pt: Cortes guardados por imagem quando aleatorio.
    en: Crops cached per image when random."""
    background: Text = option("white", pt="fundo")
    """pt: Cor sob a transparência: nome ou #rrggbb.
    en: Colour under transparency: name or #rrggbb."""
    separator: Text = option(",", pt="separador", min_length=1)
    """pt: Separa as etiquetas da legenda.
    en: Separates caption tags."""
    shuffle_captions: Boolean = option(False, pt="embaralhar_legendas", elsewhere="shuffle_caption")
    """pt: Embaralha as etiquetas.
    en: Shuffle the tags."""
    keep_tags: Integer = option(0, pt="manter_etiquetas", ge=0, le=10_000, elsewhere="keep_tokens")
    """pt: Primeiras etiquetas que não se movem nem somem.
    en: First tags that never move or drop."""
    keep_separator: Text | None = option(None, pt="separador_fixo", elsewhere="keep_tokens_separator")
    """pt: Marca (ex. |||) que separa a parte fixa da legenda.
    en: Mark (e.g. |||) that ends the fixed part of a caption."""
    tag_dropout: Number = option(0.0, pt="descarte_etiquetas", ge=0, lt=1, elsewhere="caption_tag_dropout_rate")
    """pt: Probabilidade de uma etiqueta sumir.
    en: Probability that a tag is dropped."""
    caption_dropout: Number = option(0.0, pt="descarte_legendas", ge=0, le=1, elsewhere="caption_dropout_rate")
    """pt: Probabilidade de a legenda inteira sumir.
    en: Probability that the whole caption is dropped."""
    caption_variants: Integer = option(8, pt="variantes_legenda", ge=1, le=1000)
    """pt: Versões de cada legenda guardadas no cache quando há embaralhamento ou descarte de etiquetas.
    en: Versions of each caption kept in the cache when tags are shuffled or dropped."""
    max_caption_tokens: Tokens = option("auto", pt="maximo_tokens", elsewhere="max_token_length")
    """pt: Tokens da legenda que contam; auto: o usual da família (75 no SD e SDXL, 512 no FLUX). Que outros números servem
    também depende dela.
    en: Caption tokens that count; auto: what is usual for the family (75 for SD and SDXL, 512 for FLUX). Which other numbers
    will do depends on it too."""
    cache_dir: OutputFolder | None = option(None, pt="diretorio_cache")
    """pt: Pasta do cache. Sem valor: `.cache` dentro de saida.diretorio.
    en: Cache folder. Unset: `.cache` inside output.dir."""
    cache_text_encoder: Switch = option("auto", pt="cache_codificador_texto", elsewhere="cache_text_encoder_outputs")
    """pt: Guarda as legendas já codificadas; auto: sim, menos quando o codificador é treinado.
    en: Keep captions encoded; auto: yes, unless the encoder is trained."""
    mask: Literal["no", "alpha", "files"] = option(
        "no", pt="mascara", words={"nao": "no", "não": "no", "alfa": "alpha", "arquivos": "files"})
    """pt: Perda só onde a máscara é clara: da transparência (alfa) ou de arquivos.
    en: Loss only where the mask is bright: from alpha or from files."""
    mask_dir: Folder | None = option(None, pt="diretorio_mascaras")
    """pt: Pasta das máscaras (mesmo nome). Sem valor: `nome-masklabel.png` ao lado.
    en: Mask folder (same stem). Unset: `name-masklabel.png` beside the image."""
    unmasked_weight: Number = option(0.0, pt="peso_fora_mascara", ge=0, le=1)
    """pt: Peso da perda onde a máscara é preta.
    en: Loss weight where the mask is black."""
    regularization_dir: Folder | None = option(
        None, pt="diretorio_regularizacao", elsewhere="reg_data_dir class_data_dir")
    """pt: Imagens de preservação (da classe).
    en: Prior-preservation (class) images."""
    prior_weight: Number = option(1.0, pt="peso_regularizacao", ge=0, le=1000, elsewhere="prior_loss_weight")
    """pt: Peso da perda das imagens de preservação.
    en: Loss weight of prior-preservation images."""
    text_format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = option(
        "auto", pt="formato_texto",
        words={"conversas": "messages", "pergunta_resposta": "prompt_completion", "texto": "text"})
    """pt: Formato dos dados de texto; auto reconhece cada linha pelas colunas.
    en: Schema of text data; auto recognises each row by its columns."""
    chat_template: Text = option("auto", pt="formato_conversa", words={"simples": "plain", "nenhum": "none"})
    """pt: Formato de conversa (chat template): auto usa o do tokenizador; ou chatml, llama3, mistral, gemma, phi3,
    zephyr, alpaca, simples, nenhum.
    en: Chat template: auto uses the tokenizer's; or chatml, llama3, mistral, gemma, phi3, zephyr, alpaca, plain,
    none."""
    loss_on: Literal["assistant", "all", "last"] = option(
        "assistant", pt="perda_em",
        words={"assistente": "assistant", "tudo": "all", "ultima": "last", "última": "last"},
        elsewhere="train_on_inputs")
    """pt: O que se aprende de uma conversa: as respostas (assistente), tudo, ou só a ultima resposta.
    en: What is learned of a conversation: the answers (assistant), all, or only the last answer."""
    max_length: Integer = option(
        2048, pt="comprimento_maximo", ge=8, le=2**20, elsewhere="cutoff_len max_seq_length sequence_len")
    """pt: Tokens por exemplo e por linha de lote; conversas maiores são cortadas no fim, textos são divididos.
    en: Tokens per example and per row of a batch; longer conversations are cut at the end, texts are split."""
    packing: Switch = option("auto", pt="empacotar", elsewhere="sample_packing neat_packing")
    """pt: Junta exemplos curtos na mesma linha, sem que um veja o outro; auto: sim.
    en: Put short examples into one row, none seeing another; auto: yes."""
    bad_rows: Literal["stop", "skip"] = option("stop", pt="linhas_ruins", words={"parar": "stop", "pular": "skip"})
    """pt: Linha ilegível ou de colunas desconhecidas: parar ou pular.
    en: A line that is unreadable or has unknown columns: stop or skip."""
    rows_without_target: Literal["drop", "stop"] = option(
        "drop", pt="linhas_sem_alvo", words={"descartar": "drop", "parar": "stop"})
    """pt: Exemplo sem nada a aprender depois do corte: descartar (dizendo) ou parar.
    en: An example with nothing to learn after the cut: drop (and say so) or stop."""
    validation_fraction: Number = option(0.0, pt="fracao_validacao", ge=0, le=0.5)
    """pt: Parte dos exemplos guardada para validação.
    en: Share of the examples held out for validation."""


@declared.assembled("training")
class TrainingConfig(_Assembled):
    epochs: Integer = option(
        10, pt="epocas", ge=1, le=1_000_000, elsewhere="max_train_epochs num_train_epochs num_epochs")
    """pt: Passadas pelo conjunto, no total.
    en: Passes over the data, in all."""
    max_steps: Integer | None = option(None, pt="passos_maximos", ge=1, le=MAX_STEPS, elsewhere="max_train_steps steps")
    """pt: Para neste número de passos do otimizador.
    en: Stop at this number of optimizer steps."""
    batch_size: Integer = option(
        1, pt="tamanho_lote", ge=1, le=1024, also_in="data",
        elsewhere="train_batch_size per_device_train_batch_size micro_batch_size")
    """pt: Imagens por micro-lote.
    en: Images per micro-batch."""
    gradient_accumulation_steps: Integer = option(
        1, pt="passos_acumulacao_gradiente", ge=1, le=4096, also_in="data", elsewhere="gradient_accumulation")
    """pt: Micro-lotes por passo do otimizador.
    en: Micro-batches per optimizer step."""
    learning_rate: Number = option(1e-4, pt="taxa_aprendizado", gt=0, le=10, elsewhere="lr unet_lr")
    """pt: Taxa de aprendizado.
    en: Learning rate."""
    text_encoder_learning_rate: Number | None = option(
        None, pt="taxa_aprendizado_texto", gt=0, le=10, elsewhere="text_encoder_lr")
    """pt: Taxa dos codificadores de texto. Sem valor: metade.
    en: Rate of the text encoders. Unset: half."""
    lora_plus_ratio: Number = option(1.0, pt="razao_lora_plus", ge=1, le=10_000, elsewhere="loraplus_lr_ratio")
    """pt: LoRA+: quantas vezes maior a taxa da matriz B.
    en: LoRA+: how many times larger B's rate is."""
    mixed_precision: Literal["auto", "fp16", "bf16", "no"] = option(
        "auto", pt="precisao_mista", words={"nao": "no", "não": "no", "fp32": "no"})
    """pt: Precisão do cálculo; auto escolhe pela placa.
    en: Compute precision; auto chooses by the card."""
    optimizer: OptimizerName = option(
        "adamw", pt="otimizador", elsewhere="optimizer_type", words=words(OPTIMIZERS))
    """pt: Otimizador.
    en: Optimizer."""
    weight_decay: Number = option(0.01, pt="decaimento_pesos", ge=0, le=100)
    """pt: Decaimento dos pesos.
    en: Weight decay."""
    betas: list[Number] | None = option(None, pt="betas", min_length=2, max_length=3)
    """pt: Betas do otimizador.
    en: Betas of the optimizer."""
    eps: Number | None = option(None, pt="eps", gt=0, le=1)
    """pt: Epsilon do otimizador.
    en: Optimizer epsilon."""
    optimizer_args: Free = option({}, pt="argumentos_otimizador")
    """pt: Outros argumentos do otimizador.
    en: Other arguments of the optimizer."""
    lr_scheduler: ScheduleName = option(
        "constant", pt="agendador", words=words(SCHEDULES), elsewhere="scheduler lr_scheduler_type")
    """pt: Curva da taxa: constante, linear, cosseno, cosseno_reinicios, polinomial.
    en: Curve of the rate: constant, linear, cosine, cosine_restarts, polynomial."""
    lr_warmup: Number = option(
        0.0, pt="aquecimento", ge=0, le=MAX_STEPS, elsewhere="lr_warmup_steps warmup_steps warmup_ratio")
    """pt: Aquecimento: fração dos passos (0.1) ou número de passos (100).
    en: Warm-up: share of the steps (0.1) or number of steps (100)."""
    lr_cycles: Integer = option(1, pt="ciclos", ge=1, le=100_000)
    """pt: Ciclos dos reinícios.
    en: Cycles of the restarts."""
    lr_power: Number = option(1.0, pt="potencia", gt=0, le=100)
    """pt: Potência do polinomial.
    en: Polynomial power."""
    lr_min_ratio: Number = option(0.0, pt="razao_minima", ge=0, le=1)
    """pt: Taxa final como fração da inicial.
    en: Final rate as a share of the peak."""
    max_grad_norm: Number = option(1.0, pt="norma_maxima_gradiente", ge=0, le=1_000_000)
    """pt: Corte do gradiente; 0 desliga.
    en: Clipping; 0 is off."""
    loss: LossName = option("l2", pt="perda", elsewhere="loss_type", words=words(LOSSES))
    """pt: Função de perda.
    en: Loss function."""
    huber_delta: Number = option(0.1, pt="delta_huber", gt=0, le=1000)
    """pt: Delta do huber.
    en: Delta of the huber loss."""
    min_snr_gamma: Number | None = option(None, pt="gama_min_snr", gt=0, le=1_000_000)
    """pt: Peso min-SNR (5 é usual).
    en: Min-SNR weighting (5 is usual)."""
    debiased: Boolean = option(False, pt="estimativa_sem_vies")
    """pt: Peso 1/raiz(SNR).
    en: Weight 1/sqrt(SNR)."""
    noise_offset: Number = option(0.0, pt="deslocamento_ruido", ge=0, le=1)
    """pt: Ruído por canal somado.
    en: Per-channel noise added."""
    zero_terminal_snr: Boolean = option(False, pt="snr_terminal_zero")
    """pt: Reescala o ruído para SNR final zero (modelos v).
    en: Rescale the noise schedule to zero terminal SNR (v models)."""
    timestep_min: Integer = option(0, pt="passo_ruido_minimo", ge=0, le=999)
    """pt: Menor nível de ruído.
    en: Lowest timestep."""
    timestep_max: Integer = option(1000, pt="passo_ruido_maximo", ge=1, le=1000)
    """pt: Maior nível de ruído (não incluído).
    en: Highest timestep (exclusive)."""
    timestep_sampling: SamplingName = option(
        "auto", pt="amostragem_passo_ruido", words=words(SAMPLINGS))
    """pt: Como os níveis de ruído são sorteados (FLUX e outros de fluxo retificado): auto (o da família: parábola no
    Chroma, logit_normal nos outros), uniforme, logit_normal, moda ou parábola.
    en: How noise levels are drawn (FLUX and others of rectified flow): auto (the family's: parabola for Chroma,
    logit_normal for others), uniform, logit_normal, mode or parabola."""
    timestep_shift: Number | None = option(None, pt="deslocamento_passo_ruido", ge=0, le=100)
    """pt: Desloca os níveis para mais ruído (3 é usual; 1 não desloca; 0: conforme a resolução). Sem valor: o da
    família.
    en: Shift the levels towards noise (3 is usual; 1 does not shift; 0: by resolution). Unset: the family's."""
    logit_mean: Number = option(0.0, pt="media_logit", ge=-10, le=10)
    """pt: Média do logit_normal; negativa: mais níveis de pouco ruído.
    en: Mean of logit_normal; negative: more levels of little noise."""
    logit_std: Number = option(1.0, pt="desvio_logit", gt=0, le=10)
    """pt: Desvio padrão do logit_normal.
    en: Standard deviation of logit_normal."""
    mode_scale: Number = option(1.29, pt="escala_moda", ge=-1, le=1.75)
    """pt: Quanto a amostragem moda concentra no meio.
    en: How much mode sampling favours the middle."""
    loss_weighting: WeightingName = option("none", pt="peso_niveis", words=words(WEIGHTINGS))
    """pt: Peso da perda por nível de ruído (fluxo retificado): nenhum, sigma_sqrt ou cosmap.
    en: Loss weight by noise level (rectified flow): none, sigma_sqrt or cosmap."""
    guidance: Number = option(1.0, pt="orientacao", ge=0, le=100)
    """pt: Orientação dita ao modelo enquanto treina (modelos destilados como o FLUX.1 dev; 1 é o usual).
    en: Guidance told to the model while it trains (distilled models such as FLUX.1 dev; 1 is usual)."""
    ema: Number = option(0.0, pt="media_movel", ge=0, lt=1)
    """pt: Média móvel do LoRA (EMA): o arquivo, as amostras e a validação usam a média dos passos; 0.99 é usual, 0
    desliga.
    en: Moving average of the LoRA (EMA): file, previews and validation use the average of the steps; 0.99 is usual,
    0 is off."""
    validate_every: Integer = option(0, pt="validar_cada", ge=0, le=MAX_STEPS)
    """pt: Valida a cada N passos; 0: ao fim de cada época.
    en: Validate every N steps; 0: each epoch's end."""


class SystemConfig(Section):
    seed: Integer | None = option(None, pt="semente", ge=0, le=2**63 - 1)
    """pt: Semente. Sem valor: sorteada e guardada.
    en: Seed. Unset: drawn and kept."""
    device: Text = option("auto", pt="dispositivo", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """pt: auto, cpu, cuda ou cuda:N.
    en: auto, cpu, cuda or cuda:N."""
    language: Literal["auto", "pt", "en"] = option("auto", pt="idioma")
    """pt: Idioma das mensagens.
    en: Language of the messages."""
    threads: Integer | None = option(None, pt="linhas_execucao", ge=1, le=1024)
    """pt: Linhas de execução da CPU. Sem valor: as do PyTorch.
    en: CPU threads. Unset: PyTorch's choice."""


@declared.assembled("memory")
class MemoryConfig(_Assembled):
    preset: Literal["auto", "none", "4gb", "6gb", "8gb", "12gb", "24gb"] = option(
        "auto", pt="preset", words={"nenhum": "none", "nao": "none", "não": "none", "no": "none"},
        elsewhere="low_vram lowram")
    """pt: Conjunto pronto para o tamanho da placa; auto escolhe pela memória livre, nenhum não usa.
    en: Ready-made settings for a card size; auto chooses by free memory, none uses none."""
    vram: Number | None = option(None, pt="vram", gt=0, le=1024)
    """pt: GiB da placa para este processo, contexto CUDA incluído (--vram). Sem valor: o que está livre.
    en: GiB of the card for this process, CUDA context included (--vram). Unset: what is free."""
    ram: Number | None = option(None, pt="ram", gt=0, le=65536)
    """pt: GiB de RAM que podem ser usados. Sem valor: a RAM livre menos uma reserva.
    en: GiB of host RAM that may be used. Unset: free RAM less a reserve."""
    profile: Boolean = option(False, pt="perfil")
    """pt: Grava um perfil de memória e tempo na pasta da execução.
    en: Write a profile of memory and time into the run folder."""


class OutputConfig(Section):
    name: Text | None = option(None, pt="nome", elsewhere="output_name")
    """pt: Nome do LoRA. Sem valor: o do arquivo de configuração.
    en: Name of the LoRA. Unset: that of the config file."""
    dir: OutputFolder = option("saida", pt="diretorio", elsewhere="output_dir")
    """pt: Pasta onde fica a pasta da execução.
    en: Folder that holds the run folder."""
    formats: list[Literal["auto", "kohya", "diffusers", "peft", "merged", "gguf"]] = option(
        ["auto"], pt="formatos", min_length=1)
    """pt: De imagem: kohya (A1111, Forge, ComfyUI, diffusers; o usual) e diffusers. De linguagem: peft (o usual), gguf
    (llama.cpp, Ollama) e merged (o modelo inteiro em 16 bits com o LoRA dentro).
    en: Of images: kohya (A1111, Forge, ComfyUI, diffusers; the usual one) and diffusers. Of language: peft (the
    usual one), gguf (llama.cpp, Ollama) and merged (the whole 16-bit model with the LoRA in it)."""
    precision: Literal["fp16", "bf16", "fp32"] = option("fp16", pt="precisao", elsewhere="save_precision")
    """pt: Precisão do arquivo.
    en: Precision of the file."""
    save_every: Integer = option(0, pt="salvar_cada", ge=0, le=MAX_STEPS, elsewhere="save_every_n_steps")
    """pt: Guarda o LoRA e o estado a cada N passos. 0: só o estado, a cada três minutos.
    en: Keep the LoRA and the state every N steps. 0: only the state, every three minutes."""
    keep_last: Integer = option(3, pt="manter_ultimos", ge=1, le=100_000)
    """pt: Quantos LoRAs intermediários ficam.
    en: How many intermediate LoRAs are kept."""
    title: Text | None = option(None, pt="titulo")
    """pt: Título nos metadados.
    en: Title in the metadata."""
    author: Text | None = option(None, pt="autor")
    """pt: Autor nos metadados.
    en: Author in the metadata."""
    description: Text | None = option(None, pt="descricao")
    """pt: Descrição.
    en: Description."""
    license: Text | None = option(None, pt="licenca")
    """pt: Licença.
    en: Licence."""


class SamplesConfig(Section):
    prompts: list[Text] = option([], pt="prompts", elsewhere="sample_prompts")
    """pt: Prompts das amostras.
    en: Prompts of the previews."""
    negative_prompt: Text = option("", pt="prompt_negativo")
    """pt: Prompt negativo.
    en: Negative prompt."""
    every: Integer = option(0, pt="cada", ge=0, le=MAX_STEPS, elsewhere="sample_every_n_steps")
    """pt: A cada N passos; 0: só no fim.
    en: Every N steps; 0: only at the end."""
    steps: Integer | None = option(None, pt="passos", ge=1, le=200)
    """pt: Passos do amostrador. Sem valor: os da família (25; 8 no Z-Image Turbo).
    en: Sampler steps. Unset: the family's (25; 8 for Z-Image Turbo)."""
    guidance: Number | None = option(None, pt="orientacao", ge=0, le=50)
    """pt: Força do prompt (CFG). Sem valor: a da família (7 no SD e SDXL, 3.5 no FLUX…).
    en: CFG scale. Unset: the family's (7 for SD and SDXL, 3.5 for FLUX, …)."""
    seed: Integer = option(0, pt="semente", ge=0, le=2**63 - 1)
    """pt: Semente das amostras.
    en: Seed of the previews."""
    resolution: Resolution | None = option(None, pt="resolucao")
    """pt: Tamanho; sem valor: a de treino.
    en: Size; unset: the training one."""
    max_tokens: Integer = option(128, pt="tokens_maximos", ge=1, le=100_000)
    """pt: Tokens de cada resposta de um modelo de linguagem.
    en: Tokens of a language model's answers."""
    measure: Literal["demo", "demo_language"] | None = option(
        None, pt="medida", words={"demo_linguagem": "demo_language"})
    """pt: Medida nas amostras, antes e depois: demo (conceito nas imagens) ou demo_linguagem (respostas).
    en: Measure on previews, before and after: demo (concept in images) or demo_language (answers)."""


class Config(Section):
    model: ModelConfig = section(ModelConfig, pt="modelo")
    """pt: Modelo base e LoRA.
    en: Base model and LoRA."""
    data: DataConfig = section(DataConfig, pt="dados")
    """pt: Imagens e legendas.
    en: Images and captions."""
    training: TrainingConfig = section(TrainingConfig, pt="treino")
    """pt: O treino.
    en: The training."""
    system: SystemConfig = section(SystemConfig, pt="sistema")
    """pt: A máquina.
    en: The machine."""
    memory: MemoryConfig = section(MemoryConfig, pt="memoria")
    """pt: A memória.
    en: The memory."""
    output: OutputConfig = section(OutputConfig, pt="saida")
    """pt: O que é gravado.
    en: What is written."""
    samples: SamplesConfig = section(SamplesConfig, pt="amostras")
    """pt: Amostras.
    en: Previews."""
