"""Pictures that weigh little."""

import io


def reduced(png: bytes, colours: int, width: int) -> bytes:
    """Scale a picture to a width in pixels, with so few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(content, format="png", optimize=True)
    return content.getvalue()
