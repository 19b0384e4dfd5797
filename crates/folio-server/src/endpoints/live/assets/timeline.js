// What time passed with, by kind of step, and how many tokens came of it.

const KINDS = ["prefill", "decode", "mixed", "waiting", "idle"];
const SHOWN_S = 120;

class Timeline {
  constructor() {
    this.moments = [];
    this.names = {};
  }

  begin(names, moments) {
    this.names = Object.fromEntries(names.map((name, at) => [name, at]));
    this.moments = moments;
  }

  add(moment) {
    this.moments.push(moment);
    const last = moment[this.names.at_s];
    while (this.moments.length && this.moments[0][this.names.at_s] < last - SHOWN_S - 5) this.moments.shift();
  }

  of(name) {
    return this.moments.at(-1)?.[this.names[name]];
  }

  /** Of the last seconds: a sum a second. */
  rate(name, over = 5) {
    const last = this.of("at_s");
    const recent = this.moments.filter(moment => moment[this.names.at_s] > last - over);
    const passed = recent.length > 1 ? last - recent[0][this.names.at_s] : 0;
    const sum = recent.slice(1).reduce((sum, moment) => sum + moment[this.names[name]], 0);
    return passed > 0 ? sum / passed : 0;
  }

  draw() {
    const canvas = $("timeline");
    if (!this.moments.length) return;
    const [context, width] = prepare(canvas, 170);
    const colours = KINDS.map(colour), at = this.names;
    const last = this.of("at_s"), x = time => width * (1 - (last - time) / SHOWN_S);
    const tokens = this.moments.map((moment, index) => {
      const passed = moment[at.at_s] - (this.moments[index - 1]?.[at.at_s] ?? moment[at.at_s]);
      return passed > 0 ? (moment[at.prompt_tokens] + moment[at.output_tokens]) / passed : 0;
    });
    const most = Math.max(1, ...tokens);
    for (let index = 1; index < this.moments.length; index += 1) {
      const moment = this.moments[index], from = x(this.moments[index - 1][at.at_s]), to = x(moment[at.at_s]);
      let top = 100;
      KINDS.forEach((kind, which) => {
        const height = 100 * moment[at[kind]];
        context.fillStyle = colours[which];
        context.fillRect(from, top - height, to - from + 0.5, height);
        top -= height;
      });
      context.fillStyle = colour("text");
      const height = 45 * tokens[index] / most;
      context.fillRect(from, 155 - height, Math.max(to - from - 0.5, 0.5), height);
    }
    context.fillStyle = colour("note");
    context.font = "11px system-ui";
    context.fillText("tokens a second, most " + number(most), 2, 168);
    context.textAlign = "right";
    context.fillText("now", width - 2, 168);
    context.textAlign = "left";
  }

  text(time) {
    const shares = KINDS.filter(kind => time[kind] > 0).map(kind => kind + " " + percent(time[kind]));
    $("timeline-text").textContent = "The last minute: " + (shares.join(", ") || "nothing") + ".";
    $("timeline").setAttribute("aria-label", "What time passed with, by kind of step. The last minute: " + shares.join(", "));
  }
}
