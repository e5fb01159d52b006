// The stream of what happens: opened again by itself whenever it ends, and given up when it is silent.
import { stream } from "./api.js";

const SILENCE_MS = 5000; // The gateway sends figures every second.
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 4000;

export class Live {
  /** onEvent: each event. onLink: ("up" | "lost" | "refused", error). */
  constructor({ onEvent, onLink }) {
    this.onEvent = onEvent;
    this.onLink = onLink;
    this.again = () => {};
  }

  async run() {
    let waitMs = FIRST_WAIT_MS;
    for (;;) {
      try {
        await this.follow(() => {
          waitMs = FIRST_WAIT_MS;
        });
        this.onLink("lost", null);
      } catch (error) {
        this.onLink(error.isRefusal ? "refused" : "lost", error);
        if (error.isRefusal) waitMs = Infinity; // Until there is another key.
      }
      await this.wait(waitMs);
      waitMs = Math.min((waitMs === Infinity ? FIRST_WAIT_MS : waitMs) * 2, LONGEST_WAIT_MS);
    }
  }

  /** Begin anew, now: the key is another one. */
  restart() {
    this.silence?.abort();
    this.again();
  }

  async follow(onFirst) {
    const silence = new AbortController();
    this.silence = silence;
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
    };
    heard();
    try {
      await stream("/page/api/live", {
        signal: silence.signal,
        onOpen: () => {
          onFirst();
          this.onLink("up", null);
        },
        onEvent: (event) => {
          heard();
          this.onEvent(event);
        },
      });
    } finally {
      clearTimeout(timer);
    }
  }

  wait(ms) {
    return new Promise((resolve) => {
      const timer = ms === Infinity ? 0 : setTimeout(resolve, ms);
      this.again = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
