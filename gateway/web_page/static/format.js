// Numbers as people read them.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 0, 0.4, 12.3, 1,234 */
export function count(value) {
  if (value > 0 && value < 100 && !Number.isInteger(value)) return value.toFixed(value < 10 ? 1 : 0);
  return WHOLE.format(value);
}

/** 0.4 ms, 85 ms, 1.24 s, 3 min */
export function duration(seconds) {
  if (seconds < 0.001) return `${(seconds * 1000).toFixed(2)} ms`;
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return age(seconds);
}

/** 5 s, 3 min, 2 h, 4 d */
export function age(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

/** share in [0, 1] */
export function percent(share) {
  const value = share * 100;
  return `${value > 0 && value < 1 ? "<1" : Math.round(value)} %`;
}

export function plural(number, word) {
  return `${WHOLE.format(number)} ${word}${number === 1 ? "" : "s"}`;
}
