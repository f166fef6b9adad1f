"""A UCI engine for tests: `fake_engine.py MODE FAULTS_FILE`.

It plays pawn moves of the start position (whatever the move counter says) and reports in
mid-iteration, two depths mixed, as Stockfish does after three seconds and at a node limit.
The file holds how many searches are still to go wrong, in the way of MODE: die, hang, garbage
(not UCI), illegal (moves of another position).
"""
# ruff: noqa: T201

import sys
import time
import zlib
from pathlib import Path


def install_fake(folder: Path, mode: str = "normal", faults: int = 0) -> Path:
    """An executable that runs this engine; it can be called like any engine, without arguments."""
    left, script = folder / f"{mode}.faults", folder / f"{mode}.sh"
    left.write_text(str(faults))
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -ISB '{__file__}' {mode} '{left}'\n")
    script.chmod(0o755)
    return script


def info(depth: int, rank: int, cp: int, nodes: int, move: str, bound: str = "") -> str:
    score = f"score cp {cp}{bound}"
    return f"info depth {depth} multipv {rank} {score} nodes {nodes} pv {move} a7a6"


def misbehave(mode: str) -> None:
    if mode == "die":
        sys.exit(1)
    if mode == "hang":
        time.sleep(60)
    if mode == "garbage":
        print("\x00\xff Segmentation dance")
    for rank, file in enumerate("abcde" if mode == "illegal" else "", start=1):
        print(info(2, rank, -rank, 2, f"{file}7{file}5"))
    print("bestmove e7e5", flush=True)


def think(fen: str, nodes: int, multipv: int, moves: list[str]) -> None:
    seed = zlib.crc32(fen.encode()) % 100
    moves = moves or [f"{file}2{file}3" for file in "abcdefgh"]
    moves = moves[seed % len(moves) :] + moves[: seed % len(moves)]
    ranks = list(enumerate(moves[:multipv], start=1))
    for depth in (1, 2):
        for rank, move in ranks:
            print(info(depth, rank, seed + depth - 10 * rank, depth, move))
    print(info(3, 1, 500, 3, moves[0], " lowerbound"))
    for so_far in (3, nodes) if len(ranks) > 1 else (nodes,):
        print(info(3, 1, 900, so_far, moves[-1]))
        for rank, move in ranks[1:]:
            print(info(2, rank, 800, so_far, move))
    print("bestmove", moves[0], flush=True)


def main(mode: str, faults: Path) -> None:
    multipv, fen = 1, ""
    for line in sys.stdin:
        words = line.split()
        if words[0] == "uci":
            print("id name Fake 1", "uciok", sep="\n", flush=True)
        elif words[0] == "isready":
            print("readyok", flush=True)
        elif words[:3] == ["setoption", "name", "MultiPV"]:
            multipv = int(words[4])
        elif words[0] == "position":
            fen = " ".join(words[2:])
        elif words[0] == "go":
            if left := int(faults.read_text()):
                faults.write_text(str(left - 1))
                misbehave(mode)
            else:
                think(fen, int(words[2]), multipv, words[4:])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
