"""Train, export and evaluate the models that Penstock ships.

python scripts/train_default_model.py train main --work DIR --minutes 100 [--stdlib DIR ...]
python scripts/train_default_model.py export main --work DIR --to DIR
python scripts/train_default_model.py evaluate DIR [--stdlib DIR]
python scripts/train_default_model.py card main DIR
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

import torch
from default_model.card import write_card
from default_model.corpus import Document, held_out_sources, read_corpus
from default_model.evaluation import evaluate
from default_model.export import export_model
from default_model.lines import Lines
from default_model.network import SHAPES
from default_model.training import Run, train
from default_model.vocabulary import encode_document, load_tokenizer, train_tokenizer
from tokenizers import Tokenizer


def prepared_tokenizer(work: Path, documents: list[Document]) -> Tokenizer:
    """Load the work folder's tokenizer, or train it on the library's own sources."""
    if not (work / "tokenizer.json").exists():
        train_tokenizer(d.text for d in documents).save(str(work / "tokenizer.json"))
    return load_tokenizer(work)


def command_train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    documents = read_corpus(args.stdlib)
    tokenizer = prepared_tokenizer(args.work, documents)
    rng = random.Random(args.seed)
    encoded = [torch.tensor(encode_document(tokenizer, d.text, rng), dtype=torch.int32) for d in documents]
    size = {
        "files": len(documents),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "tokens": sum(map(len, encoded)),
    }
    facts = {
        "hardware": args.hardware,
        "note": args.note,
        "muon_lr": args.muon_lr,
        "adam_lr": args.adam_lr,
        "seed": args.seed,
        "corpus": size,
    }
    print(json.dumps(facts), flush=True)
    (args.work / f"{args.model}.json").write_text(json.dumps(facts), encoding="utf-8")
    run = Run(SHAPES[args.model], muon_lr=args.muon_lr, adam_lr=args.adam_lr)
    checkpoint = args.work / f"{args.model}.safetensors"
    if args.resume and checkpoint.exists():
        run.restore(checkpoint)
    train(
        run,
        encoded,
        Lines.of(tokenizer),
        minutes=args.minutes,
        checkpoint=checkpoint,
        finish_file=args.finish_file,
        seed=args.seed,
    )


def command_export(args: argparse.Namespace) -> None:
    export_model(args.work, args.model, args.stdlib / "LICENSE.txt", args.to)


def command_evaluate(args: argparse.Namespace) -> None:
    figures = evaluate(args.directory, held_out_sources(args.stdlib))
    text = json.dumps(figures, indent=2) + "\n"
    (args.directory / "evaluation.json").write_text(text, encoding="utf-8")
    compression, completions = figures["compression"], figures["completions"]
    print(
        f"bits per byte {compression['model_bits_per_byte']} (xz -9e {compression['xz_bits_per_byte_of_all_in_one']}), "
        f"functions that parse {completions['parsed']} of {completions['headers']}"
    )


def command_card(args: argparse.Namespace) -> None:
    write_card(args.model, args.directory, SHAPES[args.model])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    stdlib = Path(sysconfig.get_path("stdlib"))

    command = commands.add_parser("train")
    command.add_argument("model", choices=SHAPES)
    command.add_argument("--work", type=Path, required=True, help="folder of tokenizer and checkpoints")
    command.add_argument("--stdlib", type=Path, nargs="+", default=[stdlib], help="standard library folders")
    command.add_argument("--minutes", type=float, default=100.0, help="active minutes")
    command.add_argument("--finish-file", type=Path, help="when it appears: decay now, within the minutes it holds")
    command.add_argument("--note", default="", help="what the model card is to say of this run besides")
    command.add_argument("--muon-lr", type=float, default=0.02)
    command.add_argument("--adam-lr", type=float, default=3e-3)
    command.add_argument("--hardware", default="a CPU", help="what it runs on, in words, for the model card")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    command.set_defaults(call=command_train)

    command = commands.add_parser("export")
    command.add_argument("model", choices=SHAPES)
    command.add_argument("--work", type=Path, required=True)
    command.add_argument("--to", type=Path, required=True, help="model folder to write")
    command.add_argument("--stdlib", type=Path, default=stdlib, help="standard library folder, for its licence")
    command.set_defaults(call=command_export)

    command = commands.add_parser("evaluate")
    command.add_argument("directory", type=Path, help="model folder")
    command.add_argument(
        "--stdlib", type=Path, default=stdlib, help="standard library folder with the held-out modules"
    )
    command.set_defaults(call=command_evaluate)

    command = commands.add_parser("card")
    command.add_argument("model", choices=SHAPES)
    command.add_argument("directory", type=Path, help="model folder, exported and evaluated")
    command.set_defaults(call=command_card)

    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
