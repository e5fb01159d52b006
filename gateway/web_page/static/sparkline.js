// A line over time, without axes: the number beside it says how much, this says whither.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 28;

export class Sparkline {
  /** capacity: points across the whole width. */
  constructor(capacity = 120) {
    this.capacity = capacity;
    this.values = [];
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.element.setAttribute("class", "spark");
    this.area = this.element.appendChild(document.createElementNS(SVG, "path"));
    this.line = this.element.appendChild(document.createElementNS(SVG, "path"));
    this.area.setAttribute("class", "area");
    this.line.setAttribute("class", "line");
  }

  /** Values come at equal times; null: nothing was measured, and the line has a gap. */
  push(...values) {
    this.values = [...this.values, ...values].slice(-this.capacity);
    this.draw();
  }

  draw() {
    const top = Math.max(...this.values.map((value) => value ?? 0), 1e-9);
    const first = this.capacity - this.values.length;
    const runs = [[]];
    this.values.forEach((value, index) => {
      if (value === null) runs.push([]);
      else runs.at(-1).push([((first + index) / (this.capacity - 1)) * WIDTH, HEIGHT - 1.5 - (value / top) * (HEIGHT - 3)]);
    });
    const shown = runs.filter((run) => run.length > 0);
    const lines = shown.map((run) => path(run.length > 1 ? run : [run[0], [run[0][0] + 1, run[0][1]]]));
    this.line.setAttribute("d", lines.join(""));
    this.area.setAttribute(
      "d",
      shown.map((run, index) => `${lines[index]}L${run.at(-1)[0].toFixed(1)} ${HEIGHT}L${run[0][0].toFixed(1)} ${HEIGHT}Z`).join(""),
    );
  }
}

function path(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}
