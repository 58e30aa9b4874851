"""Files of every kind as documents and conversations: contents, places of errors, flat memory."""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_llm.data import archives, json_stream, readers
from lit_llm.data.sources import Conversation, Document, iter_documents, list_files
from lit_llm.errors import UserError

BOM = b"\xef\xbb\xbf"
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def read(*inputs: Any, **options: Any) -> list[Any]:
    """Whole texts, and conversations as (role, content) pairs."""
    texts: list[Any] = []
    for item in iter_documents(inputs, **options):
        if isinstance(item, Conversation):
            texts.append([(m["role"], m["content"]) for m in item.messages])
        elif item.begins:
            texts.append(item.text)
        else:
            texts[-1] += item.text
    return texts


def fails(*inputs: Any, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as error:
        read(*inputs, **options)
    assert "\n" not in str(error.value)


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pack(content: bytes, suffix: str) -> bytes:
    """Two members or frames, as archives that were put together have them."""
    zstandard = pytest.importorskip("zstandard")
    make: Callable[[bytes], bytes] = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    half = len(content) // 2
    return make(content[:half]) + make(content[half:])


# ------------------------------------------------------------------- texts


@pytest.mark.parametrize("part", [1, 2, 3, 7, 64])
def test_a_text_in_parts_is_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", part)
    text = " \n\n a\r\nb\u2028c é 数学 🙂\n \ufeff x \n\n\n\n\n"
    write(tmp_path / "a.txt", BOM + BOM + text.encode())
    write(tmp_path / "b.md", "z")
    items = list(iter_documents([tmp_path]))
    documents = [item for item in items if isinstance(item, Document)]
    assert "".join(d.text for d in documents[:-1]) == text
    assert sum(d.size for d in documents[:-1]) == len(text.encode()) + 6
    flags = [(d.begins, d.ends) for d in documents]
    count = len(documents) - 1
    assert flags[:-1] == (
        [(True, True)] if count == 1 else [(True, False), *[(False, False)] * (count - 2), (False, True)]
    )
    assert flags[-1] == (True, True)
    assert count == 1 if part == 64 else count > 3


@pytest.mark.parametrize("blank", ["", " " * 50, "\n\u2028" * 20, "\ufeff" * 3])
def test_a_blank_text_in_parts_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: str) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", 8)
    write(tmp_path / "a.txt", blank)
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "c.txt", blank)
    skipped: Counter[str] = Counter()
    assert read(tmp_path, skipped=skipped) == ["b"]
    assert skipped["empty or only whitespace"] == 2


@pytest.mark.parametrize("part", [1, 2, 4, 1000])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\ntwo\nthr\xffee\n", ":3: byte 0xFF"),
        (BOM + "é\n数".encode()[:-1], ":2: byte 0xE6"),
        ("é\n数".encode()[:-1] + b"\n\n", ":2: byte 0xE6"),
        (b"\xff\xfea\0", ":1: byte 0xFF is not UTF-8; convert the file"),
    ],
)
def test_a_bad_byte_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, suffix: str, content: bytes, message: str
) -> None:
    monkeypatch.setattr(readers, "PART_BYTES", part)
    path = write(tmp_path / f"a.txt{suffix}", pack(content, suffix) if suffix else content)
    fails(path, match=f"a.txt{suffix}{message}")


def test_a_long_python_source_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONG_PYTHON", 10)
    monkeypatch.setattr(readers, "PART_BYTES", 8)
    path = write(tmp_path / "a.py", "x = 'é'\n" * 5)
    assert read(path) == ["x = 'é'\n" * 5]
    assert len(list(iter_documents([path]))) > 3


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x")

    def refuse(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(archives, "open", refuse, raising=False)
    fails(path, match=r"cannot read .*a\.txt: Permission denied")


def test_linked_folders_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "b.txt", "b")
    (tmp_path / "a" / "round").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "c.txt").symlink_to(tmp_path / "a" / "b.txt")
    skipped: Counter[str] = Counter()
    assert read(tmp_path, skipped=skipped) == ["b"]
    assert {why: count for why, count in skipped.items() if count} == {"linked folders": 1, "named twice": 1}


# ------------------------------------------------------------------- archives

CONTENTS: dict[str, tuple[bytes, list[Any]]] = {
    ".txt": ("é\r\nb".encode() * 20, ["é\r\nb" * 20]),
    ".md": (BOM + b"# t\n", ["# t\n"]),
    ".py": ("# coding: latin-1\nx = 'é'\n".encode("latin-1"), ["# coding: latin-1\nx = 'é'\n"]),
    ".jsonl": (b'{"text": "a"}\n\n{"text": "b"}', ["a", "b"]),
    ".json": (b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
    ".csv": (b'id,text\n1,a\n2,"b\n,"\n', ["a", "b\n,"]),
}


@pytest.mark.parametrize("archive", ["", ".gz", ".zst", ".GZ"])
def test_every_kind_in_every_archive(tmp_path: Path, archive: str) -> None:
    for suffix, (content, _) in CONTENTS.items():
        write(tmp_path / f"a{suffix}{archive}", pack(content, archive.lower()) if archive else content)
    expected = [text for suffix in sorted(CONTENTS) for text in CONTENTS[suffix][1]]
    assert read(tmp_path) == read(f"{tmp_path}/*") == expected
    assert list_files([tmp_path]).size == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv"])
@pytest.mark.parametrize("archive", ["", ".gz", ".zst"])
def test_sizes_add_up_to_the_file(tmp_path: Path, suffix: str, archive: str) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=100)) for _ in range(2000)]
    contents = {
        ".txt": "\n".join(texts),
        ".jsonl": "\n".join(json.dumps({"text": t}) for t in texts),
        ".json": json.dumps([{"text": t} for t in texts]),
        ".csv": "text\n" + "\n".join(texts),
    }
    content = contents[suffix].encode()
    path = write(tmp_path / f"a{suffix}{archive}", pack(content, archive) if archive else content)
    total = sum(item.size for item in iter_documents([path]))
    assert abs(total - path.stat().st_size) <= 10  # the last bracket or checksum


@pytest.mark.parametrize("archive", [".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".txt", ".py", ".jsonl", ".json", ".csv"])
def test_a_broken_archive_is_named(tmp_path: Path, archive: str, suffix: str) -> None:
    rng = random.Random(0)
    records = [{"text": "".join(rng.choices("abcdefgh", k=50))} for _ in range(3000)]
    content = json.dumps(records) if suffix == ".json" else "\n".join(json.dumps(record) for record in records)
    if suffix == ".csv":
        content = "text\n" + "\n".join(record["text"] for record in records)
    packed = pack(content.encode(), archive)
    wrong = bytearray(packed)
    wrong[len(wrong) // 4] ^= 0xFF
    for broken in (packed[:-3], packed[: len(packed) // 3], bytes(wrong), b"no archive"):
        path = write(tmp_path / f"a{suffix}{archive}", broken)
        if broken == bytes(wrong) and archive == ".zst":  # no checksum there: only sometimes seen
            continue
        fails(path, match=f"a{suffix}{archive}: broken {archive} archive: .+; make or fetch it again")
    fails(write(path, b""), match="no text in")


def test_archives_of_other_kinds(tmp_path: Path) -> None:
    for name in ("a.gz", "a.pdf.gz", "a.parquet.gz", "gz", ".gz", "a.txt.bz2"):
        path = write(tmp_path / name, "x")
        fails(path, match="cannot read files of this kind; known are .txt, .md, .py, .jsonl, .json, .csv .each also as")
    write(tmp_path / "v1.0.txt.gz", gzip.compress(b"x"))
    skipped: Counter[str] = Counter()
    assert read(tmp_path, skipped=skipped) == ["x"]
    assert skipped == {"of another kind": 5, "hidden": 1}


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name, extra in (
        ("zstandard", "a.txt.zst", "zstd"),
        ("pyarrow", "a.parquet", "parquet"),
        ("datasets", "hf:x", "datasets"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        path = name if name.startswith("hf:") else write(tmp_path / name, "x")
        fails(path, match=rf"{name}: .* need {package}: pip install 'lit-llm\[{extra}\]'")


# ------------------------------------------------------------------- JSON

RECORDS = [{"text": "a\u2028b\n", "n": 1.5e3}, {"n": [{"x": None}], "text": 'q"}],[ \\'}, {"text": "🙂é", "m": {}}]


def layouts() -> dict[str, str]:
    compact, pretty = json.dumps(RECORDS), json.dumps(RECORDS, indent=2, ensure_ascii=False)
    lines = "\n".join(json.dumps(record) for record in RECORDS)
    return {
        "compact": compact,
        "pretty": f" \n{pretty}\n\n",
        "lines": lines,
        "pretty objects": "\n".join(json.dumps(record, indent=1) for record in RECORDS) + "\n",
        "no space": "".join(json.dumps(record) for record in RECORDS),
        "in an object": json.dumps({"version": 12.5, "info": {"text": "no"}, "data": RECORDS, "end": [1, [{}]]}),
        "tight object": f'{{"data":{compact}}}',
    }


@pytest.mark.parametrize("layout", list(layouts()))
@pytest.mark.parametrize("step", [1, 2, 5, 17, 10_000])
@pytest.mark.parametrize("limit", [0, 1 << 22])
def test_json_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layout: str, step: int, limit: int
) -> None:
    monkeypatch.setattr(readers, "_JSON_BYTES", step)
    monkeypatch.setattr(json_stream, "OBJECT_CHARACTERS", limit)
    path = write(tmp_path / "a.json", BOM + layouts()[layout].encode())
    assert read(path) == [record["text"] for record in RECORDS]


def test_one_object_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alpaca = {"instruction": "i", "output": "o"}
    for limit in (1 << 22, 0):
        monkeypatch.setattr(json_stream, "OBJECT_CHARACTERS", limit)
        monkeypatch.setattr(readers, "_JSON_BYTES", 8)
        for record in (CHAT, {"tools": [{"x": 1}], **CHAT}, {"id": 1, **CHAT}):
            assert read(write(tmp_path / "a.json", json.dumps(record))) == [[("user", "q"), ("assistant", "a")]]
        assert read(write(tmp_path / "a.json", json.dumps({"rows": [alpaca]}))) == [[("user", "i"), ("assistant", "o")]]
    two = {"a": [{"text": "x"}], "b": [{"text": "y"}]}
    monkeypatch.setattr(json_stream, "OBJECT_CHARACTERS", 1 << 22)
    fails(write(tmp_path / "a.json", json.dumps(two)), match="a.json:1: record 1: no key 'text', the keys are 'a', 'b'")
    assert read(write(tmp_path / "a.json", '{"b": [{"x": 1}], "text": "t"}\n{"text": "u"}')) == ["t", "u"]


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"},\n {"text": }]', "a.json:2: not JSON: Expecting value"),
        ('[{"text": "a"},\n {"text": "b"}', r"a.json:2: not JSON: ',' or '\]' is missing"),
        ('[{"text": "a"},\n {"text": "b', "a.json:2: not JSON: Unterminated string"),
        ('[{"text": "a"}\n {"text": "b"}]', r"a.json:2: not JSON: ',' or '\]' is missing"),
        ('[{"text": "a"},\n]', "a.json:2: not JSON: Expecting value"),
        ('[{"text": "a"}]\n\n[]', "a.json:3: not JSON: there is more after the end"),
        ('{"text": "a"}\n{"text": "b"]', "a.json:2: not JSON: Expecting ',' delimiter"),
        ('{"text": "a"}\n[{"text": "b"}]', "a.json:2: record 2|a.json:2: a record must be a JSON object"),
        ('[\n\n"text"]', 'a.json:3: a record must be a JSON object, not "text"'),
        ("[\n[1,\n 2]]", r"a.json:2: a record must be a JSON object, not \[1, 2\]"),
        ("[" * 900 + "]" * 900, "a.json:1: (a record must be a JSON object|not JSON)"),
        ('"text"', 'a.json:1: a record must be a JSON object, not "text"'),
        ("text", "a.json:1: not JSON: Expecting value"),
        ("[" * 100_000, "a.json:1: not JSON: "),
        ('[{"text": 1' + "0" * 5000 + "}]", "a.json:1: not JSON: "),
        ('{"data": [{"text": "a"}\n], \n "x": 1', "a.json:3: not JSON: Expecting ',' delimiter"),
        ('{"data": [{"text": "a"}\n]} {"text": "b"}', "a.json:2: not JSON: there is more"),
        ('[{"text": "a"},\n{"id": 1}]', "a.json:2: record 2: no key 'text', the keys are 'id'"),
        ('[{"text": "a"},\n{"text": null}]', "a.json:2: record 2: 'text' must be text, it is null"),
        ('[\n{"text": "\\uD83D."}]', "a.json:2: record 1: half a surrogate pair"),
        ('[{"text": "a\nb"}]', "a.json:1: not JSON: Invalid control character"),
        ("", "no text in .*a.json"),
        (" \n[ ]\n", "no text in .*a.json"),
        ("{}", "a.json:1: record 1: no key 'text', the keys are none"),
        ("[]]", "a.json:1: not JSON: there is more"),
    ],
)
def test_bad_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, content: str, message: str) -> None:
    monkeypatch.setattr(readers, "_JSON_BYTES", step)
    fails(write(tmp_path / "a.json", content), match=message)


def test_a_bad_byte_in_json_has_its_line(tmp_path: Path) -> None:
    fails(write(tmp_path / "a.json", b'[{"text":\n"\xff"}]'), match="a.json:2: byte 0xFF")


def test_broken_json_is_not_read_to_its_end() -> None:
    taken = 0

    def pieces() -> Any:
        nonlocal taken
        yield '[{"text": "a"} {"text": "b"},'
        for number in range(1, 1000):
            taken = number
            yield '{"text": "c"},' * 10

    with pytest.raises(UserError, match="x:1: not JSON"):
        list(json_stream.json_records(pieces(), "x", "text"))
    assert taken < 5


def test_chats_in_json_lines(tmp_path: Path) -> None:
    empty = {"prompt": "q", "completion": " "}
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, [CHAT, {"text": "t"}, empty, CHAT])))
    skipped: Counter[str] = Counter()
    chat = [("user", "q"), ("assistant", "a")]
    assert read(path, skipped=skipped) == [chat, "t", chat]
    assert skipped["conversations with an empty answer"] == 1
    bad = {"messages": [{"role": "bot", "content": "x"}]}
    write(path, "\n".join(map(json.dumps, [CHAT, bad])))
    fails(path, match="a.jsonl:2: 'messages', message 1: unknown role 'bot'")
    fails(write(path, json.dumps(empty)), match="no text in")


# ------------------------------------------------------------------- CSV


def test_csv(tmp_path: Path) -> None:
    long = "x" * 200_000  # the csv module's own limit is 131,072
    rows = [["1", 'a "q"'], ["2", "line\r\nline\n\n,"], ["3", long], ["4", ""], ["5", "b\u2028\x85c"]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream).writerows([["id", "text"], *rows])
    skipped: Counter[str] = Counter()
    assert read(tmp_path / "a.csv", skipped=skipped) == [text for _, text in rows if text]
    assert skipped["empty or only whitespace"] == 1
    assert read(tmp_path / "a.csv", text_key="id") == ["1", "2", "3", "4", "5"]
    write(tmp_path / "b.csv", "\n\ninstruction,output,input\n\ndo,done,\ndo,it,this\n\n")
    assert read(tmp_path / "b.csv") == [
        [("user", "do"), ("assistant", "done")],
        [("user", "do\n\nthis"), ("assistant", "it")],
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'id,text\n1,"a\nb"\n2,a,b\n', "a.csv:4: a row of 3 fields, the first row names 2"),
        (b"id,text\n1\n", "a.csv:2: a row of 1 fields"),
        (b'text\n"a"\n"b\nc\n', "a.csv:3: not CSV: unexpected end of data"),
        (b'text\n"a"b\n', "a.csv:2: not CSV: "),
        (b"text,text\na,b\n", "a.csv:1: two columns are called 'text'"),
        (b"id,body\n1,a\n", "a.csv:2: no key 'text', the keys are 'id', 'body'"),
        (b'text\n"a\n\xff"\n', "a.csv:3: byte 0xFF"),
        (b"text\n", "no text in .*a.csv"),
        (b"", "no text in .*a.csv"),
        (b"messages\n[]\n", "a.csv:2: 'messages' must be a list of messages, it is of type str"),
    ],
)
def test_bad_csv(tmp_path: Path, content: bytes, message: str) -> None:
    fails(write(tmp_path / "a.csv", content), match=message)


# ------------------------------------------------------------------- Parquet


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    writer.write_table(pyarrow.table(columns), path, **options)
    return path


def test_parquet(tmp_path: Path) -> None:
    texts = [f"é {i}\n" for i in range(300)]
    path = parquet(tmp_path / "a.PARQUET", {"n": list(range(300)), "text": texts, "messages": ["x"] * 300})
    assert read(tmp_path) == texts
    items = list(iter_documents([path]))
    assert items[299].source == f"{path}:300"
    assert sum(item.size for item in items) == path.stat().st_size
    chats = [CHAT["messages"], [{"role": "assistant", "content": "alone"}]]
    path = parquet(tmp_path / "b.parquet", {"messages": chats, "id": [1, 2]})
    assert read(path) == [[("user", "q"), ("assistant", "a")], [("assistant", "alone")]]


def test_bad_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["a"] * 70 + [None], "body": list(range(71))})
    fails(path, match="a.parquet:71: 'text' must be text, it is null")
    fails(path, text_key="gone", match="a.parquet:1: no key 'gone', the keys are 'text', 'body'")
    fails(path, text_key="body", match="a.parquet:1: 'body' must be text, it is of type int")
    content = path.read_bytes()
    for broken in (b"", b"x" * 50, content[:-20], b"\0" * 100 + content[100:]):
        fails(write(tmp_path / "b.parquet", broken), match="b.parquet: not a Parquet file, or a broken one: ")
    fails(parquet(tmp_path / "c.parquet", {"text": []}), match="no text in")


# ------------------------------------------------------------------- data sets


def test_data_sets_from_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "train.jsonl", '{"text": "a", "n": 1}\n{"text": "", "n": 2}\n{"text": "b", "n": 3}\n')
    write(folder / "test.jsonl", '{"text": "c", "n": 1}\n')
    skipped: Counter[str] = Counter()
    assert read(f"hf:{folder}", f"hf:{folder}@test", f"hf:{folder}", skipped=skipped) == ["a", "b", "c"]
    assert skipped == {"named twice": 1, "empty or only whitespace": 1}
    assert list_files([f"hf:{folder}", folder]).size is None
    assert next(iter_documents([f"hf:{folder}"])).source == f"hf:{folder}:1"
    fails(f"hf:{folder}@gone", match="d@gone: cannot read this data set: .*gone.*; name a split by hf:NAME@SPLIT")
    fails(f"hf:{folder}:small", match="d:small: cannot read this data set: .*; name a configuration by hf:NAME:CONFIG")
    fails(f"hf:{folder}", text_key="body", match="d:1: no key 'body', the keys are 'text', 'n'")
    fails(f"hf:{folder}/train.jsonl", match="a file is no data set; name it without 'hf:'")
    (tmp_path / "p").mkdir()
    parquet(tmp_path / "p" / "x.parquet", {"messages": [CHAT["messages"]], "n": [1]})
    assert read(f"hf:{tmp_path}/p") == [[("user", "q"), ("assistant", "a")]]
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "n": [1, 2]})
    odd = tmp_path / "odd:1@2"
    rows.save_to_disk(odd)
    assert read(f"hf:{odd}") == ["x", "y"]
    fails(f"hf:{odd}@val", match="no split 'val', the folder holds one data set")
    datasets.DatasetDict({"train": rows, "val": rows.select([0])}).save_to_disk(tmp_path / "two")
    assert read(f"hf:{tmp_path}/two", f"hf:{tmp_path}/two@val") == ["x", "y", "x"]
    fails(f"hf:{tmp_path}/two@test", match="no split 'test'; name one of train, val by hf:NAME@SPLIT")
    fails(f"hf:{tmp_path}/two:x", match="no configurations; leave 'x' out")
    for entry in ("hf:", "hf:@train", "hf:x@", "hf:x:"):
        fails(entry, match="name a data set as hf:NAME")

    def no_network(name: str, *arguments: Any, **options: Any) -> Any:
        raise ConnectionError(f"Couldn't reach {name!r}\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    fails("hf:org/name", match="hf:org/name: .* reach 'org/name' on the Hub; check the network, or name a local copy")


# ------------------------------------------------------------------- memory


def peak_of(path: Path, key: str = "text") -> tuple[int, int]:
    """Peak of Python's memory while the file is read, and the characters read."""
    length = 0
    tracemalloc.start()
    try:
        for item in iter_documents([path], key):
            assert isinstance(item, Document)
            length += len(item.text)
        return tracemalloc.get_traced_memory()[1], length
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.zst", "a.json", "b.json", "a.jsonl.gz", "a.csv.zst", "one_line.txt"])
def test_memory_stays_flat(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(500).hex() + "\n" for _ in range(8000)]
    records = [json.dumps({"text": text}) for text in texts]
    content = {
        "a.json": f"[{', '.join(records)}]",
        "b.json": f'{{"version": 1, "data": [{", ".join(records)}]}}',
        "a.jsonl.gz": "\n".join(records),
        "a.csv.zst": "text\n" + "".join(f'"{text}"\n' for text in texts),
        "one_line.txt": "".join(texts).replace("\n", " "),
    }.get(name, "".join(texts))
    archive = Path(name).suffix
    raw = content.encode()
    path = write(tmp_path / name, pack(raw, archive) if archive in (".gz", ".zst") else raw)
    peak, length = peak_of(path)
    assert length == sum(map(len, texts)) == 8_008_000
    assert peak < 6_000_000
