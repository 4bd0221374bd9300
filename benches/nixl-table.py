"""Prints medians from the output of nixl-pair.py. usage: nixl-table.py FOLDER FILE..."""

import collections, json, os, statistics, sys

names = sys.argv[2:]
found = collections.defaultdict(dict)
for name in names:
    series = collections.defaultdict(list)
    path = os.path.join(sys.argv[1], name)
    for line in open(path) if os.path.exists(path) else []:
        # NIXL may print lines of its own.
        if line.startswith("{"):
            value = json.loads(line)
            series[value["case"]].append(value["us"])
    for case, values in series.items():
        found[case][name] = statistics.median(values)
print("| case | " + " | ".join(names) + " |")
print("|---" * (len(names) + 1) + "|")
for case, values in found.items():
    text = lambda value: "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
    cells = [text(values.get(name)) for name in names]
    print(f"| {case} | " + " | ".join(cells) + " |")
