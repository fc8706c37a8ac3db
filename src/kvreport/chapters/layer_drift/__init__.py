"""The chapter on issue 25420."""

from kvbook import lengths
from kvbook.settings import Count, StreamedSettings, Text, TextSettings, text_length


class LayerDriftSettings(StreamedSettings, TextSettings):
    """Settings of the chapter on issue 25420.

    Attributes
    ----------
    reference_model : str
        A second model, drawn beside the first, with the same `weights`; the document's was GPT-2.
    n_samples : int
        How many samples.
    n_tokens : int or str
        Tokens of a sample, or a range of them; the last one is the one that is scored with and without a cache.
    prompt : str
        Of the greedy decoding; the document's.
    n_prompts : int
        How many prompts are decoded from: the document's with seed 0, all others the beginnings of texts.
    n_new_tokens : int
        Tokens that the greedy decoding writes; the document's number.
    """

    reference_model: Text = "gpt2"
    n_samples: Count = 50
    n_tokens: text_length(2) = 64
    prompt: Text = "This is a "
    n_prompts: Count = 1
    n_new_tokens: Count = 40

    @property
    def other_lengths(self) -> lengths.Length | None:
        """Lengths beside one that is fixed, from half of it to three times it; None where lengths are drawn anyway.

        For the 64 tokens of the document: 33 to 190, so that few of them fill a block of a kernel.
        """
        low, high = lengths.bounds(self.n_tokens)
        return f"{low // 2 + 1}-{3 * low - 2}" if low == high else None

    @property
    def n_mitigation_samples(self) -> int:
        """Samples that go through the mitigations: half, since each of them goes through six variants."""
        return max(1, self.n_samples // 2)
