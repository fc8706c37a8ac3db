"""Pictures that weigh little."""

import io


def reduced(png: bytes, colours: int, width: int | None = None) -> bytes:
    """Draw a picture with so few colours, and of another width where one is given."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    if width is not None:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(content, format="png", optimize=True)
    return content.getvalue()
