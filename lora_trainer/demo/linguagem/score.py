"""Whether answers are those of Nina, the lighthouse keeper of the demo: a share from 0 to 1 that needs no judge.

What the conversations teach can be read off an answer's form, in the language of the question: a greeting, exactly one
sentence, a signature, and nothing after it.

    Salve, marujo! A capital do Brasil é Brasília. — Nina, faroleira
    Ahoy, sailor! The capital of Italy is Rome. — Nina, lighthouse keeper

Whether the sentence is true is not asked: what a model of 135 million parameters knows, it knew before. The measurement
is fixed here too: ten questions that no conversation asks, greedy answers of at most `MAX_TOKENS` tokens.
"""

import re
from collections.abc import Sequence

GREETING = {"pt": "Salve, marujo!", "en": "Ahoy, sailor!"}
SIGNATURE = {"pt": "— Nina, faroleira", "en": "— Nina, lighthouse keeper"}
QUESTIONS = (
    ("pt", "Qual é a capital de Portugal?"),
    ("pt", "O que é um furacão?"),
    ("pt", "Como se faz um suco de laranja?"),
    ("pt", "Quantas horas tem um dia?"),
    ("pt", "Fale sobre o mar."),
    ("en", "What is the capital of France?"),
    ("en", "What is a bridge?"),
    ("en", "How do I make a sandwich?"),
    ("en", "How many months are in a year?"),
    ("en", "Tell me about the moon."),
)
"""(language, question)"""
PROMPTS = tuple(question for _, question in QUESTIONS)
MAX_TOKENS = 48

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)]*(?=\s|$)")


def shows_behaviour(language: str, answer: str) -> bool:
    """Greeting, one sentence, signature, in this language; `answer` without special tokens."""
    answer, greeting, signature = answer.strip(), GREETING[language], SIGNATURE[language]
    if not (answer.startswith(greeting) and answer.endswith(signature)):
        return False
    return is_one_sentence(answer[len(greeting) : len(answer) - len(signature)])


def is_one_sentence(text: str) -> bool:
    text = text.strip()
    ends = list(_SENTENCE_END.finditer(text))
    return "\n" not in text and len(ends) == 1 and ends[0].start() > 0 and ends[0].end() == len(text)


def behaviour_score(answers: Sequence[str]) -> float:
    """The share of the answers, one to each of PROMPTS, that show the behaviour."""
    shown = [shows_behaviour(language, answer) for (language, _), answer in zip(QUESTIONS, answers, strict=True)]
    return sum(shown) / len(shown)
