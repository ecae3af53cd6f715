"""Every option there is, declared once. Sections are handed to the part of the program that needs them, never all.

Values that are words have a Portuguese and an English spelling too; WORDS maps the former to the latter.
"""

from typing import Literal

from pydantic import Field

from .fields import (
    MAX_SIDE,
    Boolean,
    Free,
    Integer,
    LocalPath,
    Number,
    PathOrHub,
    Resolution,
    Rules,
    Section,
    Share,
    Switch,
    Text,
    Tokens,
    option,
    section,
)

MAX_STEPS = 1_000_000_000
"""No run is longer; a larger number is a slip of the finger."""

_YES_NO = {"sim": "yes", "nao": "no", "não": "no"}
_NO = {"nao": "no", "não": "no"}

WORDS: dict[str, dict[str, str]] = {
    "lora_targets": {"atencao": "attention", "atencao+mlp": "attention+mlp", "tudo": "all"},
    "mixed_precision": {"nao": "no", "não": "no", "fp32": "no"},
    "lora_init": {"padrao": "default", "padrão": "default"},
    "prediction_type": {"v": "v_prediction", "eps": "epsilon"},
    "measure": {"demo_linguagem": "demo_language"},
    "timestep_sampling": {"uniforme": "uniform", "moda": "mode", "parábola": "parabola"},
    "loss_weighting": {"nenhum": "none", "nao": "none", "não": "none", "no": "none"},
    "bad_images": {"parar": "stop", "pular": "skip"},
    "uncaptioned": {"usar": "use", "pular": "skip", "parar": "stop"},
    "text_format": {"conversas": "messages", "pergunta_resposta": "prompt_completion", "texto": "text"},
    "chat_template": {"simples": "plain", "nenhum": "none"},
    "loss_on": {"assistente": "assistant", "tudo": "all", "ultima": "last", "última": "last"},
    "packing": _YES_NO,
    "bad_rows": {"parar": "stop", "pular": "skip"},
    "rows_without_target": {"descartar": "drop", "parar": "stop"},
    "crop": {"centro": "center", "aleatorio": "random"},
    "mask": {"nao": "no", "não": "no", "alfa": "alpha", "arquivos": "files"},
    "cache_text_encoder": {"sim": "yes", "nao": "no", "não": "no"},
    "gradient_checkpointing": _YES_NO,
    "use_8bit_optimizer": _YES_NO,
    "preset": {"nenhum": "none", "nao": "none", "não": "none", "no": "none"},
    "base_quantization": _NO,
    "block_streaming": _NO,
    "embedding_offload": _YES_NO,
    "activation_offload": _YES_NO,
    "optimizer_offload": _YES_NO,
    "optimizer_in_backward": _YES_NO,
    "vae_tiling": _YES_NO,
    "text_quantization": _NO,
    "text_streaming": _YES_NO,
    "mapped_master": _YES_NO,
    "lr_scheduler": {
        "constante": "constant",
        "cosseno": "cosine",
        "cosseno_reinicios": "cosine_restarts",
        "polinomial": "polynomial",
    },
}
"""Option -> Portuguese word -> the word used in code. A boolean `false` counts as "no", `true` as "yes"."""

Optimizer = Literal[
    "adamw", "adamw8bit", "pagedadamw8bit", "lion8bit", "adafactor", "prodigy", "came", "schedulefree_adamw"
]


class ModelConfig(Section):
    base_model: PathOrHub | None = option(
        None, pt="modelo_base",
        doc_pt="Modelo base: arquivo .safetensors, pasta do diffusers ou id do Hugging Face.",
        doc_en="Base model: .safetensors file, diffusers folder or Hugging Face id.")
    family: Text = option(
        "auto", pt="familia",
        doc_pt="Família do modelo; auto reconhece pelo cabeçalho do arquivo.",
        doc_en="Model family; auto recognises it from the file's header.")
    vae: PathOrHub | None = option(
        None, pt="vae", doc_pt="VAE separado: arquivo ou pasta.", doc_en="Separate VAE: file or folder.")
    text_encoder: PathOrHub | None = option(
        None, pt="codificador_texto",
        doc_pt="Codificador de texto separado, como no ComfyUI: clip_l (FLUX, SD3), qwen… Arquivo ou pasta.",
        doc_en="Separate text encoder, as for ComfyUI: clip_l (FLUX, SD3), qwen… File or folder.")
    text_encoder_2: PathOrHub | None = option(
        None, pt="codificador_texto_2",
        doc_pt="Segundo codificador de texto: t5xxl (FLUX) ou clip_g (SD3). Arquivo ou pasta.",
        doc_en="Second text encoder: t5xxl (FLUX) or clip_g (SD3). File or folder.")
    text_encoder_3: PathOrHub | None = option(
        None, pt="codificador_texto_3",
        doc_pt="Terceiro codificador de texto: t5xxl (SD3). Arquivo ou pasta.",
        doc_en="Third text encoder: t5xxl (SD3). File or folder.")
    tokenizer: LocalPath | None = option(
        None, pt="tokenizador",
        doc_pt="Pasta do tokenizador (ou com as subpastas tokenizer, tokenizer_2), quando o modelo base não o traz.",
        doc_en="Folder of the tokenizer (or with sub-folders tokenizer, tokenizer_2), when the base brings none.")
    @property
    def base_or_architecture(self) -> str | None:
        """For planning, which config files tell as much as a whole base."""
        return self.base_model or self.architecture

    architecture: LocalPath | None = option(
        None, pt="arquitetura",
        doc_pt="Pasta com config.json no formato diffusers, para arquivos únicos de tamanho fora do comum.",
        doc_en="Folder with diffusers config.json files, for single files of an unusual size.")
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = option(
        "auto", pt="tipo_predicao",
        doc_pt="O que o modelo prevê; auto lê do arquivo quando ele diz.",
        doc_en="What the model predicts; auto reads it from the file where it tells.")
    clip_skip: Integer = option(
        1, pt="pular_clip", ge=1, le=12,
        doc_pt="Camada do CLIP contada do fim (1 = última, 2 = penúltima). Só SD 1.x.",
        doc_en="CLIP layer counted from the end (1 = last, 2 = penultimate). SD 1.x only.")
    adapter_kind: Literal["lora", "loha", "lokr"] = option(
        "lora", pt="tipo_adaptador",
        doc_pt="O que se treina sobre cada camada: lora; ou loha e lokr (LyCORIS), só em modelos de imagem.",
        doc_en="What is trained on each layer: lora; or loha and lokr (LyCORIS), in image models only.")
    lora_rank: Integer = option(
        16, pt="classificacao_lora", ge=1, le=1024, doc_pt="Rank (posto) do LoRA.", doc_en="Rank of the LoRA.")
    lora_alpha: Number | None = option(
        None, pt="alfa_lora", gt=0, le=1_000_000,
        doc_pt="Alfa do LoRA; a força é alfa/rank. Sem valor: igual ao rank.",
        doc_en="Alpha of the LoRA; its strength is alpha/rank. Unset: equal to the rank.")
    lora_dropout: Number = option(
        0.0, pt="dropout_lora", ge=0, lt=1, doc_pt="Dropout na entrada do LoRA.", doc_en="Dropout on the LoRA's input.")
    lora_targets: Text = option(
        "auto", pt="alvos_lora",
        doc_pt="Camadas com LoRA: auto (atencao nos modelos de imagem, tudo nos de linguagem), atencao, atencao+mlp, tudo "
        "(com convoluções) ou uma expressão regular.",
        doc_en="Layers with LoRA: auto (attention in image models, all in language models), attention, attention+mlp, all "
        "(with convolutions) or a regular expression.")
    conv_rank: Integer | None = option(
        None, pt="classificacao_conv", ge=1, le=1024,
        doc_pt="Rank nas convoluções 3x3. Sem valor: o mesmo.", doc_en="Rank in 3x3 convolutions. Unset: the same.")
    conv_alpha: Number | None = option(
        None, pt="alfa_conv", gt=0, le=1_000_000,
        doc_pt="Alfa nas convoluções 3x3. Sem valor: mesma força das outras camadas.",
        doc_en="Alpha in 3x3 convolutions. Unset: the same strength as elsewhere.")
    rslora: Boolean = option(
        False, pt="rslora", doc_pt="Força alfa/raiz(rank) (rsLoRA).", doc_en="Strength alpha/sqrt(rank) (rsLoRA).")
    dora: Boolean = option(
        False, pt="dora", doc_pt="Decompõe direção e magnitude (DoRA).", doc_en="Weight-decomposed LoRA (DoRA).")
    lokr_factor: Integer | None = option(
        None, pt="fator_lokr", ge=2, le=1024,
        doc_pt="LoKr: tamanho da primeira matriz (4, 8 ou 16 são usuais; menor guarda mais). Sem valor: perto da raiz.",
        doc_en="LoKr: size of the first matrix (4, 8 or 16 are usual; smaller holds more). Unset: near the square root.")
    lora_init: Literal["default", "pissa"] = option(
        "default", pt="inicializacao_lora",
        doc_pt="Como o LoRA começa: padrao (B = 0), ou pissa (as componentes principais do modelo base; o arquivo final tem "
        "o dobro do rank).",
        doc_en="How the LoRA starts: default (B = 0), or pissa (the base's principal components; the final file has twice "
        "the rank).")
    lora_rules: Rules = option(
        [], pt="regras_lora",
        doc_pt="Rank, alfa ou taxa de aprendizado de algumas das camadas, por expressão regular: "
        "[{alvo: 'attn2', rank: 32, alfa: 16, taxa: 5e-5}]. De cada um, vale a primeira regra que combina e o diz.",
        doc_en="Rank, alpha or learning rate of some of the layers, by regular expression: "
        "[{target: 'attn2', rank: 32, alpha: 16, rate: 5e-5}]. Of each, the first rule that matches and says it counts.")
    train_text_encoder: Boolean = option(
        False, pt="treinar_codificador_texto",
        doc_pt="Treina também um LoRA nos codificadores de texto.", doc_en="Also train a LoRA on the text encoders.")
    initial_lora: LocalPath | None = option(
        None, pt="lora_inicial",
        doc_pt="Arquivo LoRA de onde continuar (mesmo rank e alvos).",
        doc_en="LoRA file to continue from (same rank and targets).")
    training_lora: LocalPath | None = option(
        None, pt="lora_de_treino",
        doc_pt="LoRA que o modelo base usa só no treino, como o adaptador de treino do Z-Image Turbo; fora do arquivo final.",
        doc_en="LoRA that the base wears while training only, such as Z-Image Turbo's training adapter; not in the final file.")


class DataConfig(Section):
    data_dir: LocalPath | None = option(
        None, pt="diretorio_dados",
        doc_pt="Pasta das imagens: simples, com subpastas, ou no formato `10_nome` do kohya. Ou os textos: arquivo .jsonl, "
        ".json, .csv, .parquet, ou pasta.",
        doc_en="Image folder: plain, with sub-folders, or in kohya's `10_name` form. Or the texts: a .jsonl, .json, .csv or "
        ".parquet file, or a folder.")
    resolution: Resolution = option(
        (512, 512), pt="resolucao",
        doc_pt="Resolução de treino: 512, 512x768 ou [512, 768]; define a área dos buckets.",
        doc_en="Training resolution: 512, 512x768 or [512, 768]; sets the area of the buckets.")
    recursive: Boolean = option(True, pt="recursivo", doc_pt="Lê subpastas.", doc_en="Read sub-folders.")
    repeats: Integer | None = option(
        None, pt="repeticoes", ge=1, le=10000,
        doc_pt="Vezes que cada imagem aparece por época. Sem valor: do nome `N_` da pasta, ou 1.",
        doc_en="Times each image appears per epoch. Unset: from the folder's `N_` name, or 1.")
    trigger: Text | None = option(
        None, pt="palavra_gatilho",
        doc_pt="Palavra que ativa o LoRA: entra no começo das legendas e substitui [trigger].",
        doc_en="Word that activates the LoRA: put at the start of captions, replaces [trigger].")
    caption_column: Text | None = option(
        None, pt="coluna_legenda",
        doc_pt="Coluna da legenda em metadata.jsonl ou .csv.", doc_en="Caption column in metadata.jsonl or .csv.")
    uncaptioned: Literal["use", "skip", "stop"] = option(
        "use", pt="sem_legenda",
        doc_pt="Imagem sem legenda: usar, pular ou parar.", doc_en="Image without caption: use, skip or stop.")
    bad_images: Literal["stop", "skip"] = option(
        "stop", pt="imagens_ruins",
        doc_pt="Imagem ilegível: parar ou pular.", doc_en="Unreadable image: stop or skip.")
    min_side: Integer = option(
        64, pt="lado_minimo", ge=1, le=MAX_SIDE,
        doc_pt="Lado menor que isto: imagem deixada de fora, pelo nome.",
        doc_en="A side below this: image left out, by name.")
    max_pixels: Integer = option(
        178_000_000, pt="pixels_maximos", ge=4096, le=10_000_000_000,
        doc_pt="Imagem maior que isto é tratada como ruim.", doc_en="A larger image counts as bad.")
    buckets: Boolean = option(
        True, pt="usar_buckets",
        doc_pt="Agrupa por proporção; desligado, corta tudo na resolução.",
        doc_en="Group by aspect ratio; off, everything is cropped to the resolution.")
    bucket_step: Integer = option(
        64, pt="passo_bucket", ge=8, le=512, multiple_of=8,
        doc_pt="Lados dos buckets são múltiplos disto.", doc_en="Bucket sides are multiples of this.")
    upscale: Boolean = option(
        False, pt="ampliar", doc_pt="Amplia imagens pequenas.", doc_en="Enlarge small images.")
    flip: Boolean = option(
        False, pt="espelhar",
        doc_pt="Espelha na horizontal, ao acaso (duas versões no cache).",
        doc_en="Mirror at random (two versions in the cache).")
    crop: Literal["center", "random"] = option(
        "center", pt="corte", doc_pt="Corte: centro ou aleatorio.", doc_en="Crop: center or random.")
    crop_variants: Integer = option(
        4, pt="variantes_corte", ge=1, le=64,
        doc_pt="Cortes guardados por imagem quando aleatorio.", doc_en="Crops cached per image when random.")
    background: Text = option(
        "white", pt="fundo",
        doc_pt="Cor sob a transparência: nome ou #rrggbb.", doc_en="Colour under transparency: name or #rrggbb.")
    separator: Text = option(
        ",", pt="separador", min_length=1, doc_pt="Separa as etiquetas da legenda.", doc_en="Separates caption tags.")
    shuffle_captions: Boolean = option(
        False, pt="embaralhar_legendas", doc_pt="Embaralha as etiquetas.", doc_en="Shuffle the tags.")
    keep_tags: Integer = option(
        0, pt="manter_etiquetas", ge=0, le=10_000,
        doc_pt="Primeiras etiquetas que não se movem nem somem.", doc_en="First tags that never move or drop.")
    keep_separator: Text | None = option(
        None, pt="separador_fixo",
        doc_pt="Marca (ex. |||) que separa a parte fixa da legenda.",
        doc_en="Mark (e.g. |||) that ends the fixed part of a caption.")
    tag_dropout: Number = option(
        0.0, pt="descarte_etiquetas", ge=0, lt=1,
        doc_pt="Probabilidade de uma etiqueta sumir.", doc_en="Probability that a tag is dropped.")
    caption_dropout: Number = option(
        0.0, pt="descarte_legendas", ge=0, le=1,
        doc_pt="Probabilidade de a legenda inteira sumir.", doc_en="Probability that the whole caption is dropped.")
    caption_variants: Integer = option(
        8, pt="variantes_legenda", ge=1, le=1000,
        doc_pt="Versões de cada legenda guardadas no cache quando há embaralhamento ou descarte de etiquetas.",
        doc_en="Versions of each caption kept in the cache when tags are shuffled or dropped.")
    max_caption_tokens: Tokens = option(
        "auto", pt="maximo_tokens",
        doc_pt="Tokens da legenda que contam; auto: o usual da família (75 no SD e SDXL, 512 no FLUX). Que outros números "
        "servem também depende dela.",
        doc_en="Caption tokens that count; auto: what is usual for the family (75 for SD and SDXL, 512 for FLUX). Which "
        "other numbers will do depends on it too.")
    cache_dir: LocalPath | None = option(
        None, pt="diretorio_cache",
        doc_pt="Pasta do cache. Sem valor: `.cache` dentro de saida.diretorio.",
        doc_en="Cache folder. Unset: `.cache` inside output.dir.")
    cache_text_encoder: Literal["auto", "yes", "no"] = option(
        "auto", pt="cache_codificador_texto",
        doc_pt="Guarda as legendas já codificadas; auto: sim, menos quando o codificador é treinado.",
        doc_en="Keep captions encoded; auto: yes, unless the encoder is trained.")
    mask: Literal["no", "alpha", "files"] = option(
        "no", pt="mascara",
        doc_pt="Perda só onde a máscara é clara: da transparência (alfa) ou de arquivos.",
        doc_en="Loss only where the mask is bright: from alpha or from files.")
    mask_dir: LocalPath | None = option(
        None, pt="diretorio_mascaras",
        doc_pt="Pasta das máscaras (mesmo nome). Sem valor: `nome-masklabel.png` ao lado.",
        doc_en="Mask folder (same stem). Unset: `name-masklabel.png` beside the image.")
    unmasked_weight: Number = option(
        0.0, pt="peso_fora_mascara", ge=0, le=1,
        doc_pt="Peso da perda onde a máscara é preta.", doc_en="Loss weight where the mask is black.")
    regularization_dir: LocalPath | None = option(
        None, pt="diretorio_regularizacao",
        doc_pt="Imagens de preservação (da classe).", doc_en="Prior-preservation (class) images.")
    prior_weight: Number = option(
        1.0, pt="peso_regularizacao", ge=0, le=1000,
        doc_pt="Peso da perda das imagens de preservação.", doc_en="Loss weight of prior-preservation images.")
    text_format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"] = option(
        "auto", pt="formato_texto",
        doc_pt="Formato dos dados de texto; auto reconhece cada linha pelas colunas.",
        doc_en="Schema of text data; auto recognises each row by its columns.")
    chat_template: Text = option(
        "auto", pt="formato_conversa",
        doc_pt="Formato de conversa (chat template): auto usa o do tokenizador; ou chatml, llama3, mistral, gemma, phi3, "
        "zephyr, alpaca, simples, nenhum.",
        doc_en="Chat template: auto uses the tokenizer's; or chatml, llama3, mistral, gemma, phi3, zephyr, alpaca, plain, "
        "none.")
    loss_on: Literal["assistant", "all", "last"] = option(
        "assistant", pt="perda_em",
        doc_pt="O que se aprende de uma conversa: as respostas (assistente), tudo, ou só a ultima resposta.",
        doc_en="What is learned of a conversation: the answers (assistant), all, or only the last answer.")
    max_length: Integer = option(
        2048, pt="comprimento_maximo", ge=8, le=2**20,
        doc_pt="Tokens por exemplo e por linha de lote; conversas maiores são cortadas no fim, textos são divididos.",
        doc_en="Tokens per example and per row of a batch; longer conversations are cut at the end, texts are split.")
    packing: Switch = option(
        "auto", pt="empacotar",
        doc_pt="Junta exemplos curtos na mesma linha, sem que um veja o outro; auto: sim.",
        doc_en="Put short examples into one row, none seeing another; auto: yes.")
    bad_rows: Literal["stop", "skip"] = option(
        "stop", pt="linhas_ruins",
        doc_pt="Linha ilegível ou de colunas desconhecidas: parar ou pular.",
        doc_en="A line that is unreadable or has unknown columns: stop or skip.")
    rows_without_target: Literal["drop", "stop"] = option(
        "drop", pt="linhas_sem_alvo",
        doc_pt="Exemplo sem nada a aprender depois do corte: descartar (dizendo) ou parar.",
        doc_en="An example with nothing to learn after the cut: drop (and say so) or stop.")
    validation_fraction: Number = option(
        0.0, pt="fracao_validacao", ge=0, le=0.5,
        doc_pt="Parte dos exemplos guardada para validação.", doc_en="Share of the examples held out for validation.")


class TrainingConfig(Section):
    epochs: Integer = option(
        10, pt="epocas", ge=1, le=1_000_000,
        doc_pt="Passadas pelo conjunto, no total.", doc_en="Passes over the data, in all.")
    max_steps: Integer | None = option(
        None, pt="passos_maximos", ge=1, le=MAX_STEPS,
        doc_pt="Para neste número de passos do otimizador.", doc_en="Stop at this number of optimizer steps.")
    batch_size: Integer = option(
        1, pt="tamanho_lote", ge=1, le=1024, doc_pt="Imagens por micro-lote.", doc_en="Images per micro-batch.")
    gradient_accumulation_steps: Integer = option(
        1, pt="passos_acumulacao_gradiente", ge=1, le=4096,
        doc_pt="Micro-lotes por passo do otimizador.", doc_en="Micro-batches per optimizer step.")
    learning_rate: Number = option(
        1e-4, pt="taxa_aprendizado", gt=0, le=10, doc_pt="Taxa de aprendizado.", doc_en="Learning rate.")
    text_encoder_learning_rate: Number | None = option(
        None, pt="taxa_aprendizado_texto", gt=0, le=10,
        doc_pt="Taxa dos codificadores de texto. Sem valor: metade.",
        doc_en="Rate of the text encoders. Unset: half.")
    lora_plus_ratio: Number = option(
        1.0, pt="razao_lora_plus", ge=1, le=10_000,
        doc_pt="LoRA+: quantas vezes maior a taxa da matriz B.", doc_en="LoRA+: how many times larger B's rate is.")
    mixed_precision: Literal["auto", "fp16", "bf16", "no"] = option(
        "auto", pt="precisao_mista",
        doc_pt="Precisão do cálculo; auto escolhe pela placa.", doc_en="Compute precision; auto chooses by the card.")
    gradient_checkpointing: Switch = option(
        "auto", pt="checkpoint_gradiente",
        doc_pt="Recalcula ativações no passo de volta para economizar memória; auto: se o plano precisar.",
        doc_en="Recompute activations in the backward pass to save memory; auto: if the plan needs it.")
    optimizer: Optimizer = option("adamw", pt="otimizador", doc_pt="Otimizador.", doc_en="Optimizer.")
    use_8bit_optimizer: Switch = option(
        "auto", pt="use_otimizador_8bit",
        doc_pt="Usa a versão de 8 bits do otimizador (bitsandbytes); auto: se o plano precisar.",
        doc_en="Use the 8-bit version of the optimizer (bitsandbytes); auto: if the plan needs it.")
    weight_decay: Number = option(
        0.01, pt="decaimento_pesos", ge=0, le=100, doc_pt="Decaimento dos pesos.", doc_en="Weight decay.")
    betas: list[Number] | None = option(
        None, pt="betas", min_length=2, max_length=3, doc_pt="Betas do otimizador.", doc_en="Betas of the optimizer.")
    eps: Number | None = option(None, pt="eps", gt=0, le=1, doc_pt="Epsilon do otimizador.", doc_en="Optimizer epsilon.")
    optimizer_args: Free = Field(
        default_factory=dict,
        json_schema_extra={
            "pt": "argumentos_otimizador",
            "doc_pt": "Outros argumentos do otimizador.",
            "doc_en": "Other arguments of the optimizer.",
        })
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial"] = option(
        "constant", pt="agendador",
        doc_pt="Curva da taxa: constante, linear, cosseno, cosseno_reinicios, polinomial.",
        doc_en="Curve of the rate: constant, linear, cosine, cosine_restarts, polynomial.")
    lr_warmup: Number = option(
        0.0, pt="aquecimento", ge=0, le=MAX_STEPS,
        doc_pt="Aquecimento: fração dos passos (0.1) ou número de passos (100).",
        doc_en="Warm-up: share of the steps (0.1) or number of steps (100).")
    lr_cycles: Integer = option(
        1, pt="ciclos", ge=1, le=100_000, doc_pt="Ciclos dos reinícios.", doc_en="Cycles of the restarts.")
    lr_power: Number = option(
        1.0, pt="potencia", gt=0, le=100, doc_pt="Potência do polinomial.", doc_en="Polynomial power.")
    lr_min_ratio: Number = option(
        0.0, pt="razao_minima", ge=0, le=1,
        doc_pt="Taxa final como fração da inicial.", doc_en="Final rate as a share of the peak.")
    max_grad_norm: Number = option(
        1.0, pt="norma_maxima_gradiente", ge=0, le=1_000_000,
        doc_pt="Corte do gradiente; 0 desliga.", doc_en="Clipping; 0 is off.")
    loss: Literal["l2", "huber", "smooth_l1"] = option(
        "l2", pt="perda", doc_pt="Função de perda.", doc_en="Loss function.")
    huber_delta: Number = option(
        0.1, pt="delta_huber", gt=0, le=1000, doc_pt="Delta do huber.", doc_en="Delta of the huber loss.")
    min_snr_gamma: Number | None = option(
        None, pt="gama_min_snr", gt=0, le=1_000_000,
        doc_pt="Peso min-SNR (5 é usual).", doc_en="Min-SNR weighting (5 is usual).")
    debiased: Boolean = option(
        False, pt="estimativa_sem_vies", doc_pt="Peso 1/raiz(SNR).", doc_en="Weight 1/sqrt(SNR).")
    noise_offset: Number = option(
        0.0, pt="deslocamento_ruido", ge=0, le=1, doc_pt="Ruído por canal somado.", doc_en="Per-channel noise added.")
    zero_terminal_snr: Boolean = option(
        False, pt="snr_terminal_zero",
        doc_pt="Reescala o ruído para SNR final zero (modelos v).",
        doc_en="Rescale the noise schedule to zero terminal SNR (v models).")
    timestep_min: Integer = option(
        0, pt="passo_ruido_minimo", ge=0, le=999, doc_pt="Menor nível de ruído.", doc_en="Lowest timestep.")
    timestep_max: Integer = option(
        1000, pt="passo_ruido_maximo", ge=1, le=1000,
        doc_pt="Maior nível de ruído (não incluído).", doc_en="Highest timestep (exclusive).")
    timestep_sampling: Literal["auto", "uniform", "logit_normal", "mode", "parabola"] = option(
        "auto", pt="amostragem_passo_ruido",
        doc_pt="Como os níveis de ruído são sorteados (FLUX e outros de fluxo retificado): auto (o da família: parábola no "
        "Chroma, logit_normal nos outros), uniforme, logit_normal, moda ou parábola.",
        doc_en="How noise levels are drawn (FLUX and others of rectified flow): auto (the family's: parabola for Chroma, "
        "logit_normal for others), uniform, logit_normal, mode or parabola.")
    timestep_shift: Number | None = option(
        None, pt="deslocamento_passo_ruido", ge=0, le=100,
        doc_pt="Desloca os níveis para mais ruído (3 é usual; 1 não desloca; 0: conforme a resolução). Sem valor: o da "
        "família.",
        doc_en="Shift the levels towards noise (3 is usual; 1 does not shift; 0: by resolution). Unset: the family's.")
    logit_mean: Number = option(
        0.0, pt="media_logit", ge=-10, le=10,
        doc_pt="Média do logit_normal; negativa: mais níveis de pouco ruído.",
        doc_en="Mean of logit_normal; negative: more levels of little noise.")
    logit_std: Number = option(
        1.0, pt="desvio_logit", gt=0, le=10,
        doc_pt="Desvio padrão do logit_normal.", doc_en="Standard deviation of logit_normal.")
    mode_scale: Number = option(
        1.29, pt="escala_moda", ge=-1, le=1.75,
        doc_pt="Quanto a amostragem moda concentra no meio.", doc_en="How much mode sampling favours the middle.")
    loss_weighting: Literal["none", "sigma_sqrt", "cosmap"] = option(
        "none", pt="peso_niveis",
        doc_pt="Peso da perda por nível de ruído (fluxo retificado): nenhum, sigma_sqrt ou cosmap.",
        doc_en="Loss weight by noise level (rectified flow): none, sigma_sqrt or cosmap.")
    guidance: Number = option(
        1.0, pt="orientacao", ge=0, le=100,
        doc_pt="Orientação dita ao modelo enquanto treina (modelos destilados como o FLUX.1 dev; 1 é o usual).",
        doc_en="Guidance told to the model while it trains (distilled models such as FLUX.1 dev; 1 is usual).")
    ema: Number = option(
        0.0, pt="media_movel", ge=0, lt=1,
        doc_pt="Média móvel do LoRA (EMA): o arquivo, as amostras e a validação usam a média dos passos; 0.99 é usual, 0 "
        "desliga.",
        doc_en="Moving average of the LoRA (EMA): file, previews and validation use the average of the steps; 0.99 is usual, "
        "0 is off.")
    validate_every: Integer = option(
        0, pt="validar_cada", ge=0, le=MAX_STEPS,
        doc_pt="Valida a cada N passos; 0: ao fim de cada época.",
        doc_en="Validate every N steps; 0: each epoch's end.")


class SystemConfig(Section):
    seed: Integer | None = option(
        None, pt="semente", ge=0, le=2**63 - 1,
        doc_pt="Semente. Sem valor: sorteada e guardada.", doc_en="Seed. Unset: drawn and kept.")
    device: Text = option(
        "auto", pt="dispositivo", pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        doc_pt="auto, cpu, cuda ou cuda:N.", doc_en="auto, cpu, cuda or cuda:N.")
    language: Literal["auto", "pt", "en"] = option(
        "auto", pt="idioma", doc_pt="Idioma das mensagens.", doc_en="Language of the messages.")
    threads: Integer | None = option(
        None, pt="linhas_execucao", ge=1, le=1024,
        doc_pt="Linhas de execução da CPU. Sem valor: as do PyTorch.", doc_en="CPU threads. Unset: PyTorch's choice.")


class MemoryConfig(Section):
    preset: Literal["auto", "none", "4gb", "6gb", "8gb", "12gb", "24gb"] = option(
        "auto", pt="preset",
        doc_pt="Conjunto pronto para o tamanho da placa; auto escolhe pela memória livre, nenhum não usa.",
        doc_en="Ready-made settings for a card size; auto chooses by free memory, none uses none.")
    vram: Number | None = option(
        None, pt="vram", gt=0, le=1024,
        doc_pt="GiB da placa para este processo, contexto CUDA incluído (--vram). Sem valor: o que está livre.",
        doc_en="GiB of the card for this process, CUDA context included (--vram). Unset: what is free.")
    ram: Number | None = option(
        None, pt="ram", gt=0, le=65536,
        doc_pt="GiB de RAM que podem ser usados. Sem valor: a RAM livre menos uma reserva.",
        doc_en="GiB of host RAM that may be used. Unset: free RAM less a reserve.")
    base_quantization: Literal["auto", "no", "nf4", "int8", "fp8"] = option(
        "auto", pt="quantizacao_base",
        doc_pt="Como o modelo base congelado é guardado: nao (16 bits), fp8, int8 ou nf4 (4 bits).",
        doc_en="How the frozen base is stored: no (16 bits), fp8, int8 or nf4 (4 bits).")
    block_streaming: Share = option(
        "auto", pt="streaming_blocos",
        doc_pt="Parte dos blocos do modelo base que fica na RAM e vem à placa quando é usada: nao ou de 0 a 1.",
        doc_en="Share of the base's blocks kept in RAM and brought to the card when used: no, or 0 to 1.")
    embedding_offload: Switch = option(
        "auto", pt="descarga_embeddings",
        doc_pt="Guarda na RAM os embeddings e a cabeça de um modelo de linguagem; só as linhas em uso vêm à placa.",
        doc_en="Keep a language model's embeddings and head in RAM; only the rows in use come to the card.")
    activation_offload: Switch = option(
        "auto", pt="descarga_ativacoes",
        doc_pt="Guarda na RAM as ativações dos checkpoints de gradiente.",
        doc_en="Keep the activations of gradient checkpoints in RAM.")
    optimizer_offload: Switch = option(
        "auto", pt="descarga_otimizador",
        doc_pt="Guarda na RAM os momentos do otimizador; os de cada peso vêm à placa só para a sua atualização.",
        doc_en="Keep the optimizer's moments in RAM; each weight's come to the card for its own update only.")
    optimizer_in_backward: Switch = option(
        "no", pt="otimizador_no_backward",
        doc_pt="Atualiza cada peso assim que seu gradiente existe; sem acumulação e sem corte de gradiente.",
        doc_en="Step each weight as soon as its gradient exists; without accumulation and without clipping.")
    vae_tiling: Switch = option(
        "auto", pt="vae_em_blocos",
        doc_pt="Codifica e decodifica imagens em blocos.", doc_en="Encode and decode images in tiles.")
    text_quantization: Literal["auto", "no", "nf4", "int8"] = option(
        "auto", pt="quantizacao_texto",
        doc_pt="Como os codificadores de texto são guardados ao codificar as legendas: nao, int8 ou nf4.",
        doc_en="How text encoders are stored while captions are encoded: no, int8 or nf4.")
    text_streaming: Switch = option(
        "auto", pt="streaming_texto",
        doc_pt="Os codificadores de texto vêm à placa camada por camada.",
        doc_en="Text encoders come to the card layer by layer.")
    mapped_master: Switch = option(
        "auto", pt="mestre_em_disco",
        doc_pt="Com pouca RAM, a cópia de onde os blocos vêm é um arquivo mapeado em disco.",
        doc_en="With little RAM, the copy that blocks are streamed from is a file mapped from disk.")
    profile: Boolean = option(
        False, pt="perfil",
        doc_pt="Grava um perfil de memória e tempo na pasta da execução.",
        doc_en="Write a profile of memory and time into the run folder.")


class OutputConfig(Section):
    name: Text | None = option(
        None, pt="nome", doc_pt="Nome do LoRA. Sem valor: o do arquivo de configuração.",
        doc_en="Name of the LoRA. Unset: that of the config file.")
    dir: LocalPath = option(
        "saida", pt="diretorio",
        doc_pt="Pasta onde fica a pasta da execução.", doc_en="Folder that holds the run folder.")
    formats: list[Literal["auto", "kohya", "diffusers", "peft", "merged", "gguf"]] = option(
        ["auto"], pt="formatos", min_length=1,
        doc_pt="De imagem: kohya (A1111, Forge, ComfyUI, diffusers; o usual) e diffusers. De linguagem: peft (o usual), "
        "gguf (llama.cpp, Ollama) e merged (o modelo inteiro em 16 bits com o LoRA dentro).",
        doc_en="Of images: kohya (A1111, Forge, ComfyUI, diffusers; the usual one) and diffusers. Of language: peft (the "
        "usual one), gguf (llama.cpp, Ollama) and merged (the whole 16-bit model with the LoRA in it).")
    precision: Literal["fp16", "bf16", "fp32"] = option(
        "fp16", pt="precisao", doc_pt="Precisão do arquivo.", doc_en="Precision of the file.")
    save_every: Integer = option(
        0, pt="salvar_cada", ge=0, le=MAX_STEPS,
        doc_pt="Guarda o LoRA e o estado a cada N passos. 0: só o estado, a cada três minutos.",
        doc_en="Keep the LoRA and the state every N steps. 0: only the state, every three minutes.")
    keep_last: Integer = option(
        3, pt="manter_ultimos", ge=1, le=100_000,
        doc_pt="Quantos LoRAs intermediários ficam.", doc_en="How many intermediate LoRAs are kept.")
    title: Text | None = option(None, pt="titulo", doc_pt="Título nos metadados.", doc_en="Title in the metadata.")
    author: Text | None = option(None, pt="autor", doc_pt="Autor nos metadados.", doc_en="Author in the metadata.")
    description: Text | None = option(None, pt="descricao", doc_pt="Descrição.", doc_en="Description.")
    license: Text | None = option(None, pt="licenca", doc_pt="Licença.", doc_en="Licence.")


class SamplesConfig(Section):
    prompts: list[Text] = option(
        [], pt="prompts", doc_pt="Prompts das amostras.", doc_en="Prompts of the previews.")
    negative_prompt: Text = option("", pt="prompt_negativo", doc_pt="Prompt negativo.", doc_en="Negative prompt.")
    every: Integer = option(
        0, pt="cada", ge=0, le=MAX_STEPS,
        doc_pt="A cada N passos; 0: só no fim.", doc_en="Every N steps; 0: only at the end.")
    steps: Integer | None = option(
        None, pt="passos", ge=1, le=200,
        doc_pt="Passos do amostrador. Sem valor: os da família (25; 8 no Z-Image Turbo).",
        doc_en="Sampler steps. Unset: the family's (25; 8 for Z-Image Turbo).")
    guidance: Number | None = option(
        None, pt="orientacao", ge=0, le=50,
        doc_pt="Força do prompt (CFG). Sem valor: a da família (7 no SD e SDXL, 3.5 no FLUX…).",
        doc_en="CFG scale. Unset: the family's (7 for SD and SDXL, 3.5 for FLUX, …).")
    seed: Integer = option(
        0, pt="semente", ge=0, le=2**63 - 1, doc_pt="Semente das amostras.", doc_en="Seed of the previews.")
    resolution: Resolution | None = option(
        None, pt="resolucao", doc_pt="Tamanho; sem valor: a de treino.", doc_en="Size; unset: the training one.")
    max_tokens: Integer = option(
        128, pt="tokens_maximos", ge=1, le=100_000,
        doc_pt="Tokens de cada resposta de um modelo de linguagem.", doc_en="Tokens of a language model's answers.")
    measure: Literal["demo", "demo_language"] | None = option(
        None, pt="medida",
        doc_pt="Medida nas amostras, antes e depois: demo (conceito nas imagens) ou demo_linguagem (respostas).",
        doc_en="Measure on previews, before and after: demo (concept in images) or demo_language (answers).")


class Config(Section):
    model: ModelConfig = section(ModelConfig, pt="modelo", doc_pt="Modelo base e LoRA.", doc_en="Base model and LoRA.")
    data: DataConfig = section(DataConfig, pt="dados", doc_pt="Imagens e legendas.", doc_en="Images and captions.")
    training: TrainingConfig = section(TrainingConfig, pt="treino", doc_pt="O treino.", doc_en="The training.")
    system: SystemConfig = section(SystemConfig, pt="sistema", doc_pt="A máquina.", doc_en="The machine.")
    memory: MemoryConfig = section(MemoryConfig, pt="memoria", doc_pt="A memória.", doc_en="The memory.")
    output: OutputConfig = section(OutputConfig, pt="saida", doc_pt="O que é gravado.", doc_en="What is written.")
    samples: SamplesConfig = section(SamplesConfig, pt="amostras", doc_pt="Amostras.", doc_en="Previews.")


MOVED = {("data", "batch_size"): "training", ("data", "gradient_accumulation_steps"): "training"}
"""Options also accepted in another section, as the seeds show them: (section, option) -> where they live."""
