"""Keep the blocks' linear and convolution layers as 8-bit floats (e4m3): 1 byte a weight instead of 2.

Each output row is scaled to the format's range, so a weight moves by at most 1/16 of itself (3 bits of mantissa); normal
weights lose 3 % (root mean square), where quantize_8bit loses less than 1 %. Its merit is with outliers: small weights of
a row stay as exact as large ones. Only storage is in fp8, so it works on every card. Acts on what quantize_4bit left alone
when both are on.
"""


from ._quantizer import RowQuantizer


class CastFp8(RowQuantizer):
    storage = "float8_e4m3fn"
    value = "fp8"
    loses = 0.03
    mildness = 75
    asked_only = True
    """int8 is as small, and closer."""
    order = 14


TECHNIQUE = CastFp8
