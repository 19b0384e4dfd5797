"""Averages the weights of two checkpoints of one run: what the later one has learnt, with less of what it forgot.

    python average.py DIR/end-calls-more.pt DIR/end-calls-wide.pt --share 0.7 --out DIR/averaged.pt
"""

import argparse
from pathlib import Path

import torch


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("earlier", type=Path)
    p.add_argument("later", type=Path)
    p.add_argument("--share", type=float, default=0.7, help="of the later one")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    earlier, later = (torch.load(path, weights_only=False, map_location="cpu") for path in (a.earlier, a.later))
    later["model"] = {k: a.share * v + (1 - a.share) * earlier["model"][k] for k, v in later["model"].items()}
    torch.save(later, a.out)


if __name__ == "__main__":
    main()
