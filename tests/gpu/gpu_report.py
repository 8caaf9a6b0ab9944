"""The figures as text and as Markdown."""

NAMES = {
    "layer_norm": "LayerNorm forward",
    "rms_norm": "RMSNorm forward",
    "layer_norm_backward": "LayerNorm backward",
    "rms_norm_backward": "RMSNorm backward",
}


def line(figures):
    """One row of the table of times, for the terminal."""
    text = (
        f"{figures['operation']:<20} {figures['format']:<9} {figures['rows']:>7} x {figures['cols']:<6} "
        f"{1e6 * figures['seconds']:9.1f} us  {figures['bytes_a_second'] / 1e12:6.3f} TB/s  "
        f"{100 * figures['fraction_of_copy']:5.1f} % of copy"
    )
    for name, taken in figures["peers"].items():
        text += f"  {name}: " + ("-" if taken is None else f"{1e6 * taken:.1f} us")
    return text


def markdown(results, command):
    """The tables for docs/performance.md."""
    lines = []
    speed = results["sections"].get("speed", {}).get("rows", [])
    compiled = {
        (row["operation"], row["format"], row["cols"]): row["peers"]
        for row in results["sections"].get("compiled", {}).get("rows", [])
    }
    for operation, title in NAMES.items():
        for format_ in dict.fromkeys(row["format"] for row in speed):
            rows = [row for row in speed if row["operation"] == operation and row["format"] == format_]
            if not rows:
                continue
            for row in rows:
                row["peers"] |= compiled.get((operation, format_, row["cols"]), {})
            peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
            lines += [f"**{title}, {format_}**", ""]
            lines.append("| rows × columns | npnorm, µs | TB/s | of the copy's speed |" + "".join(
                f" {name}, µs |" for name in peers
            ))  # fmt: skip
            lines.append("| --- |" + " ---: |" * (3 + len(peers)))
            for row in rows:
                cells = [
                    f"{row['rows']:,} × {row['cols']:,}", f"{1e6 * row['seconds']:.1f}",
                    f"{row['bytes_a_second'] / 1e12:.2f}", f"{100 * row['fraction_of_copy']:.0f} %",
                ]  # fmt: skip
                for name in peers:
                    taken = row["peers"].get(name)
                    cells.append("" if taken is None else f"{1e6 * taken:.1f}")
                lines.append("| " + " | ".join(cells) + " |")
            lines.append("")
    costs = results["sections"].get("launch cost", {}).get("costs")
    if costs:
        names = list(dict.fromkeys(name for each in costs.values() for name in each))
        lines += ["**The host's part of a call, µs**", "", "| 8 × 1,024 bfloat16 |" + "".join(f" {n} |" for n in names)]
        lines.append("| --- |" + " ---: |" * len(names))
        for operation, each in costs.items():
            cells = [each.get(name) for name in names]
            cells = [f"{1e6 * cell:.1f}" if isinstance(cell, float) else "" for cell in cells]
            lines.append(f"| {NAMES[operation]} | " + " | ".join(cells) + " |")
        lines.append("")
    ceilings = results["sections"].get("ceilings", {}).get("rows", [])
    if ceilings:
        best = max(ceilings, key=lambda row: row["bytes"])
        lines.append(
            f"A copy of {best['bytes'] / 2**20:.0f} MiB: {best['memcpy'] / 1e12:.2f} TB/s by the driver, "
            f"{best['kernel'] / 1e12:.2f} TB/s by a kernel, bytes read and written.\n"
        )
    about = results["sections"].get("versions", {})
    versions = ", ".join(f"{name} {version}" for name, version in about.get("packages", {}).items() if version)
    lines.append(f"Measured on {results['date']}: {about.get('device', {}).get('device', '?')}; {versions}.")
    lines.append(f"Command: `{command}`.")
    return "\n".join(lines) + "\n"


def goals(rows, wanted):
    """Which of the figures between 1,024 and 16,384 columns are below the goal."""
    judged = [row for row in rows if 1024 <= row["cols"] <= 16384]
    missed = [row for row in judged if not row["fraction_of_copy"] >= wanted[row["operation"]]]
    text = (
        "goals (90 % of the copy's speed forward, 80 % backward, 1,024 to 16,384 columns): "
        f"{len(judged) - len(missed)} of {len(judged)} are reached"
    )
    for row in missed:
        text += f"\n  missed: {line(row)}"
    return text
