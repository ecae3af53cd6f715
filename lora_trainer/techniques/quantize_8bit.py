"""Keep the blocks' linear and convolution layers as 8-bit integers: 1 byte a weight instead of 2.

Each output row has its own factor, so a weight moves by at most 1/254 of its row's largest; normal weights lose less than
1 % (root mean square). Only storage is in 8 bits: the weight is unpacked and computed with in the usual precision. Acts on
what quantize_4bit left alone when both are on. Left out: integer matrix products (LLM.int8()), which quantise activations.
"""


from ._quantizer import BASE, TEXT, RowQuantizer


class Quantize8bit(RowQuantizer):
    options = (BASE, TEXT)
    storage = "int8"
    value = "int8"
    loses = 0.01
    mildness = 80
    order = 12


TECHNIQUE = Quantize8bit
