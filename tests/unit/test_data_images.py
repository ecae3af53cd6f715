"""Single files: what is whole, how large it is upright, its colours. Cases A02, A04, A09, A12 of the bug reports."""

import io
import struct

import numpy as np
import pytest
from data_cases import img
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from lora_trainer.data.buckets import cover
from lora_trainer.data.images import BadImage, background_colour, inspect, load, load_grey
from lora_trainer.errors import ConfigError

WHITE = (255, 255, 255)
LIMIT = 178_000_000


def pixels(path, background=WHITE, size=(64, 64)):
    """(upright RGB array, alpha or None) at `size`."""
    facts = inspect(path, LIMIT)
    rgb, alpha = load(path, cover(facts.size, size), (0, 0, 1, 1), background)
    return np.asarray(rgb).astype(int), alpha


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_comes_before_the_size(tmp_path, orientation):
    image = Image.new("RGB", (120, 60))
    image.paste((255, 0, 0), (0, 0, 60, 60))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "o.jpg", exif=exif, quality=95)
    assert inspect(tmp_path / "o.jpg", LIMIT).size == ((120, 60) if orientation < 5 else (60, 120))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_gives_the_pixels_that_viewers_show(tmp_path, orientation):
    image = Image.new("RGB", (120, 60), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 60, 60))
    image.paste((0, 255, 0), (0, 0, 60, 30))  # no turn or mirror image of it is alike
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "o.png", exif=exif)
    shown = ImageOps.exif_transpose(Image.open(tmp_path / "o.png"))
    rgb, _ = pixels(tmp_path / "o.png", size=shown.size)
    assert np.abs(rgb - np.asarray(shown)).max() <= 2


def test_a_phone_photo_stands_upright(tmp_path):
    image = Image.new("RGB", (120, 60))
    image.paste((255, 0, 0), (0, 0, 60, 60))
    exif = image.getexif()
    exif[0x0112] = 6
    for name in ("o6.jpg", "o6.png", "o6.webp"):
        image.save(tmp_path / name, exif=exif, quality=95)
        rgb, _ = pixels(tmp_path / name, size=(60, 120))
        assert rgb[:50, :, 0].min() > 200, "red above"
        assert rgb[70:, :, 0].max() < 50
        assert load_grey(tmp_path / name, (60, 120), (0, 0, 1, 1)).getpixel((30, 10)) > 50, "masks turn alike"


def test_broken_exif_is_only_noted(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "x.jpg", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert inspect(tmp_path / "x.jpg", LIMIT).size == (64, 64)


def test_bad_files_say_why(tmp_path):
    whole = img(tmp_path / "trunc.jpg", 512, 512).read_bytes()
    cases = {
        "trunc.jpg": (whole[: len(whole) // 2], "incompleta"),
        "zero.png": (b"", "vazio"),
        "zeros.png": (bytes(64), "zeros"),
        "html.jpg": (b"<html>404</html>", "página web"),
        "lfs.png": (b"version https://git-lfs\noid sha256:00", "git-lfs"),
        "text.png": (b"hello", "não é uma imagem"),
    }
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadImage, match=reason):
            inspect(tmp_path / name, LIMIT)
    with pytest.raises(BadImage, match="não pôde ser lida"):
        inspect(tmp_path / "absent.png", LIMIT)


def test_truncated_png_is_found(tmp_path):
    path = img(tmp_path / "x.png", 300, 300)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(BadImage, match="incompleta"):
        inspect(path, LIMIT)


def test_content_decides_not_the_name(tmp_path):
    path = img(tmp_path / "x.jpg").rename(tmp_path / "fake.png")
    assert inspect(path, LIMIT).size == (256, 256)


def test_huge_image_is_refused_with_its_size_and_giant_text_is_not(tmp_path, recwarn):
    Image.new("1", (20000, 10000)).save(tmp_path / "big.png")
    with pytest.raises(BadImage, match=r"200\.000\.000 pixels.*pixels_maximos"):
        inspect(tmp_path / "big.png", LIMIT)
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a" * (2 * 1024 * 1024), zip=True)
    Image.new("RGB", (64, 64)).save(tmp_path / "txt.png", pnginfo=info)
    assert inspect(tmp_path / "txt.png", LIMIT).size == (64, 64)
    Image.new("L", (10000, 9000)).save(tmp_path / "p90.png")
    assert inspect(tmp_path / "p90.png", LIMIT).size == (10000, 9000)
    assert not recwarn.list


@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_animations_give_their_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (64, 64), (i * 100, 0, 0)) for i in range(3)]
    frames[0].save(tmp_path / f"x.{suffix}", save_all=True, append_images=frames[1:])
    assert "animated" in inspect(tmp_path / f"x.{suffix}", LIMIT).notes
    assert pixels(tmp_path / f"x.{suffix}")[0].max() < 10


def test_alpha_lies_over_the_background(tmp_path):
    image = Image.new("RGBA", (64, 64), (200, 0, 0, 255))
    image.paste((0, 0, 200, 0), (0, 0, 32, 64))
    image.save(tmp_path / "a.png")
    image.quantize(8).save(tmp_path / "p.png")
    for name in ("a.png", "p.png"):
        assert "alpha" in inspect(tmp_path / name, LIMIT).notes
        rgb, alpha = pixels(tmp_path / name, background=(0, 255, 0))
        assert rgb[32, 5].tolist() == [0, 255, 0]
        assert rgb[32, 60].tolist() == [200, 0, 0]
        assert alpha.getpixel((5, 32)) == 0
        assert alpha.getpixel((60, 32)) == 255


def test_every_mode_becomes_rgb(tmp_path):
    base = Image.linear_gradient("L").resize((64, 64))
    for mode, suffix in [("1", "png"), ("L", "png"), ("P", "gif"), ("LA", "png"), ("CMYK", "jpg"), ("YCbCr", "jpg")]:
        path = tmp_path / f"{mode}.{suffix}"
        base.convert(mode).save(path)
        rgb, _ = pixels(path)
        assert rgb.shape == (64, 64, 3)
        assert rgb[:8].mean() < 40, mode
        assert rgb[-8:].mean() > 200, mode


def test_16_bit_greys_are_scaled_not_clipped(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(64, 0)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    Image.fromarray(ramp.astype(np.int32)).save(tmp_path / "i.tiff")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "f.tiff")
    for name in ("x.png", "i.tiff", "f.tiff"):
        rgb, _ = pixels(tmp_path / name)
        assert abs(rgb[10, 32, 0] - 129) <= 3, name


def display_p3() -> bytes:
    """A minimal ICC profile with Display P3's primaries (D50-adapted) and gamma 2.2."""

    def xyz(*values):
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(v * 65536)) for v in values)

    gamma = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(2.2 * 256)) + b"\0\0"
    tags = [
        (b"wtpt", xyz(0.9642, 1.0, 0.8249)),
        (b"rXYZ", xyz(0.5151, 0.2412, -0.0011)),
        (b"gXYZ", xyz(0.2919, 0.6922, 0.0419)),
        (b"bXYZ", xyz(0.1572, 0.0666, 0.7841)),
        (b"rTRC", gamma),
        (b"gTRC", gamma),
        (b"bTRC", gamma),
    ]
    table, body, place = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, data in tags:
        table += struct.pack(">4sII", name, place + len(body), len(data))
        body += data
    head = struct.pack(">I4sI4s4s4s", place + len(body), b"\0" * 4, 0x02400000, b"mntr", b"RGB ", b"XYZ ")
    head += b"\0" * 12 + b"acsp" + b"\0" * 28 + struct.pack(">iii", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + table + body


def test_colour_profiles_become_srgb(tmp_path):
    assert ImageCms.ImageCmsProfile(io.BytesIO(display_p3()))
    colour = (200, 60, 60)
    Image.new("RGB", (64, 64), colour).save(tmp_path / "p3.png", icc_profile=display_p3())
    assert not inspect(tmp_path / "p3.png", LIMIT).notes
    red, green, _ = pixels(tmp_path / "p3.png")[0][0, 0]
    assert red > 205, "P3's red is further out than sRGB's"
    assert green < 57
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.new("RGB", (64, 64), colour).save(tmp_path / "s.png", icc_profile=srgb)
    assert np.abs(pixels(tmp_path / "s.png")[0] - colour).max() <= 1


def test_a_broken_profile_is_only_noted(tmp_path):
    Image.new("RGB", (64, 64), (9, 99, 9)).save(tmp_path / "x.png", icc_profile=b"not a profile")
    assert "broken_profile" in inspect(tmp_path / "x.png", LIMIT).notes
    assert pixels(tmp_path / "x.png")[0][0, 0].tolist() == [9, 99, 9]


def test_real_photographs_survive_the_cut(tmp_path):
    from skimage import data

    photo = Image.fromarray(data.astronaut())
    photo.save(tmp_path / "a.jpg", quality=95)
    photo.save(tmp_path / "a.png")
    photo.save(tmp_path / "a.avif", quality=95)
    whole = np.asarray(photo.resize((128, 128), Image.Resampling.LANCZOS)).astype(int)
    for name in ("a.jpg", "a.png", "a.avif"):
        rgb, _ = pixels(tmp_path / name, size=(128, 128))
        assert np.abs(rgb - whole).mean() < 4, name
    half, _ = load(tmp_path / "a.png", cover((512, 512), (128, 128)), (0, 0, 0.5, 0.5), WHITE)
    top_left = np.asarray(photo.crop((0, 0, 256, 256)).resize((128, 128), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(np.asarray(half).astype(int) - top_left).mean() < 2


def test_a_much_larger_picture_keeps_its_shape(tmp_path):
    image = Image.new("RGB", (4000, 3000), (200, 0, 0))
    image.paste((0, 0, 200), (2000, 0, 4000, 3000))
    image.save(tmp_path / "x.png")
    rgb, _ = load(tmp_path / "x.png", cover((4000, 3000), (64, 48)), (0, 0, 1, 1), WHITE)
    assert rgb.getpixel((10, 24)) == (200, 0, 0)
    assert rgb.getpixel((50, 24)) == (0, 0, 200)


def test_colour_names():
    assert background_colour("branco") == WHITE
    assert background_colour("#102030") == (16, 32, 48)
    with pytest.raises(ConfigError, match="xyz"):
        background_colour("xyz")
