"""Any language model; whether transformers builds it, the family finds out when it opens one."""

from ...files.kinds import LANGUAGE_MODEL, Signature

SIGNATURE = Signature((LANGUAGE_MODEL,))
