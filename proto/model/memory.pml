/* Shared memory as weak as C++ allows its stores to be.
 *
 * Each store of a process waits in a buffer of its own and reaches memory some time later. A plain or
 * relaxed store may overtake any other but those to its own word; a release store leaves only when all
 * before it have left, and may itself be overtaken by relaxed ones after it. A load looks at memory at
 * once, so every store, release or not, can be delayed past later loads; only a seq_cst fence waits
 * until the buffer is empty. x86 delays stores but keeps their order, so it can do less than this; ARM
 * reorders as here. No process here loads a word that it has stored itself.
 *
 * The including file defines WORDS, PROCESSES and OVERTAKE_ALL (one OVERTAKE(word) for each word that is
 * stored relaxed). Loads keep their order, as acquire makes them; a mutant shows what that is for.
 */
#ifndef DELAYED
#define DELAYED 4 /* stores that a process can have in its buffer */
#endif

byte memory[WORDS];
chan delayed[PROCESSES] = [DELAYED] of { byte, byte, bit }; /* word, value, release */

inline relaxed(me, word, value) { delayed[me] ! word, value, 0 }
inline release(me, word, value) { delayed[me] ! word, value, 1 }
inline fence(me) { (len(delayed[me]) == 0) }

#define OVERTAKE(number) \
  :: atomic { delayed[me] ?? eval(number), value, 0 -> memory[number] = value; value = 0 }

proctype Memory(byte me) {
  byte word, value;
  bit ordered;
end:
  do
  :: atomic {
       delayed[me] ? word, value, ordered ->
       memory[word] = value;
       word = 0; value = 0; ordered = 0
     }
  OVERTAKE_ALL
  od
}
