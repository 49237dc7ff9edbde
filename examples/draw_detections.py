"""Draws a checkpoint's detections on a validation sample, as in the README.

    python examples/draw_detections.py CHECKPOINT PICTURE [--index N] [OVERRIDE ...]

The picture of the README: the default training (`bash scripts/quickstart.sh`), validation batch 20.
"""

import argparse
from pathlib import Path

import bev_lightning as bev


def main() -> None:
    """Writes a JPEG or PNG of one sample; prints how many of its objects were found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("picture", type=Path, help="file to write, .jpg or .png")
    parser.add_argument("overrides", nargs="*", help="such as data.root=/data/nuscenes")
    parser.add_argument("--index", type=int, default=0, help="batch of the validation split")
    parser.add_argument("--sample", type=int, default=0, help="row of the batch")
    parser.add_argument("--min-score", type=float, default=0.35)
    parser.add_argument("--width", type=int, default=1100, help="of the picture [pixels]")
    args = parser.parse_args()

    run = bev.load(*args.overrides, ckpt=args.checkpoint)
    batch = run.batch(index=args.index)
    boxes = run.predict(batch)
    picture = run.draw(batch, boxes, sample=args.sample, min_score=args.min_score)
    picture.thumbnail((args.width, args.width))
    picture.save(args.picture, quality=85, optimize=True)
    print(f"{args.picture}: {picture.width} x {picture.height} pixels")


if __name__ == "__main__":
    main()
