/* Fishplate: put, get, put-signal, atomics and tagged messages between processes, over shared
 * memory and libfabric rails. Signals, atomics and messages to a peer take effect in the order
 * issued, whatever rails carry them. See docs/c.md for a first program.
 *
 * A function that returns int returns 0 or more on success, and a negative errno value on failure.
 * After a failure fp_last_error () returns a message. A function that fails has no effect, unless
 * documented otherwise. A null, closed or made-up handle is an error, never undefined behaviour.
 * Pointers to buffers, strings and results must be valid during the call.
 *
 * The thread that opens a node owns it. After fp_node_unbind the next thread that calls into the
 * node owns it. Calls of other threads fail with -EPERM. A signal handler must not call any
 * function. If it interrupts a call on a node and calls into the same node, that call fails with
 * -EBUSY. After fork, all handles are closed in the child. If a signal handler that has interrupted
 * a call forks, its child must call exec or _exit before the handler returns. No function invokes
 * callbacks or installs a signal handler. The library itself reads environment variables only if
 * FP_LAUNCHER is given. It starts up to four short-lived threads that close descriptors. libfabric
 * reads its own variables and may start threads.
 *
 * The library starts no processes and carries no addresses between them: under a launcher use MPI
 * (examples/mpi/all_to_all.c), a file or any other channel.
 *
 * Timeouts are in milliseconds: 0 checks once, and a negative timeout never expires. */
#ifndef FISHPLATE_H
#define FISHPLATE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: major, minor and patch in one number. */
#define FP_VERSION 0x000100

typedef struct fp_node fp_node;
/* A peer. Valid until fp_peer_disconnect. Error texts contain only the lower 16 bits. */
typedef uint32_t fp_peer;
/* Memory of this node, and imported memory of a peer. */
typedef uint64_t fp_mem;
typedef uint64_t fp_remote;
/* An operation in flight, and a posted receive. */
typedef uint64_t fp_token;
typedef uint64_t fp_request;

/* As the peer of a call: all peers, or any peer. */
#define FP_ANY UINT32_MAX
/* The token of an operation that completed before the call returned. Its completion is not
   reported. */
#define FP_OVER UINT64_MAX

/* Maximum length in bytes of an address, and of a memory handle. */
#define FP_ADDRESS_MAX 1024
#define FP_HANDLE_MAX 512

/* ---- Errors ---------------------------------------------------------------------------------- */

/* Returns the FP_VERSION of the library. */
uint32_t fp_version (void);
/* Returns a short static description of a return value. */
const char *fp_strerror (int status);
/* Returns the message of this thread's last failed call, at most 511 bytes. The pointer is valid
 * until the thread ends. The next failure replaces the text. */
const char *fp_last_error (void);

/* ---- Nodes ----------------------------------------------------------------------------------- */

/* Disables shared memory for peers on this host. */
#define FP_NO_SHARED_MEMORY 1u
/* FP_NO_FABRIC opens no libfabric rails. FP_REQUIRE_FABRIC makes fp_node_open fail if it cannot
 * open at least one rail. */
#define FP_NO_FABRIC 2u
#define FP_REQUIRE_FABRIC 4u
/* Provides a descriptor to wait on (fp_node_fd), even without libfabric rails. */
#define FP_WAIT_FD 8u
/* Creates a page of counters for the node, which `fishplate stat` shows while the program runs. */
#define FP_COUNTERS 16u
/* Reads local_rank from the environment variables of the program's launcher (docs/jobs.md). If none
 * is set, the field local_rank applies. */
#define FP_LAUNCHER 32u

/* Settings of a node. Zero the structure, then set struct_size. A field that is 0 or null
 * selects the default, which the comment of the field names. */
typedef struct fp_options {
  size_t struct_size;          /* sizeof (fp_options) */
  uint32_t flags;              /* FP_NO_SHARED_MEMORY and so on */
  uint32_t peers;              /* maximum number of peers: 64 */
  uint32_t regions;            /* maximum number of regions: 64; long messages use some */
  uint32_t imports;            /* maximum number of imported regions: 256 */
  uint32_t operations;         /* maximum number of operations in flight: 1024; at most 2^20 */
  uint32_t patience_ms;        /* how long an operation waits for room: 10,000 */
  uint32_t connect_timeout_ms; /* how long the first use of a peer waits for it: 10,000 */
  uint32_t max_rails;          /* maximum number of libfabric rails: 16 */
  const char *providers;       /* separated by commas; default: the fastest usable provider */
  const char *interfaces;      /* separated by commas, one rail each; default: the nearest */
  uint32_t local_rank;         /* number of this process among those of its host: 0. Processes that
                                  may open fewer rails than there are near NICs begin with
                                  different NICs */
} fp_options;

/* Opens a node. `options` may be null. A process may have at most 64 nodes open. Slow: loads
 * libfabric. */
int fp_node_open (const fp_options *options, fp_node **node);
/* Closes a node. Waits until everything sent is applied and every peer knows that this node leaves.
 * Returns -ETIMEDOUT if some work was incomplete. The handle is invalid afterwards, unless the
 * call returns -EPERM or -EBUSY. */
int fp_node_close (fp_node *node, int64_t timeout_ms);
/* Ends this thread's ownership of the node. The next thread that calls into the node owns it. */
int fp_node_unbind (fp_node *node);
/* Copies out the address that peers connect to. It changes when a libfabric rail fails, so call
 * this again before another peer connects. On entry `*len` is the size of the buffer, on return the
 * required size. Returns -EMSGSIZE if the buffer is too small. */
int fp_node_address (fp_node *node, void *address, size_t *len);
/* Makes progress without waiting. Returns the number of events. */
int fp_progress (fp_node *node);

/* For event loops: prepares a wait, makes progress, and returns a descriptor. Wait until the
 * descriptor is readable, but never read from it. `*timeout_ms` receives the maximum time to
 * wait, or 0 if there is work already. Call this before each wait, then check again whether the
 * program's condition holds. Returns -ENOTSUP if the node was opened without FP_WAIT_FD, or if a
 * provider has no descriptor. */
int fp_node_fd (fp_node *node, int *timeout_ms);

/* ---- Peers ----------------------------------------------------------------------------------- */

/* Connects a peer by its address. The peer must connect to our address too, in any order. Does not
 * wait. */
int fp_peer_connect (fp_node *node, const void *address, size_t len, fp_peer *peer);
/* Returns 0 while a peer on this host has not connected yet, else 1. The first use of a peer on
 * another host connects it. Returns -ECONNRESET if the peer failed, -ESHUTDOWN if it closed its
 * node. */
int fp_peer_state (fp_node *node, fp_peer peer);
/* Disconnects a peer. Operations in flight to it fail, and its imported memory is released. */
int fp_peer_disconnect (fp_node *node, fp_peer peer);

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Allocates zeroed memory that peers on this host can map and NICs can access. */
int fp_mem_alloc (fp_node *node, size_t len, fp_mem *memory);
/* Registers memory of the program, aligned to 8 bytes. Peers may write it at any time. The memory
 * must stay valid until fp_mem_free returns 0 or the node is closed, and until all peers have
 * released it. */
int fp_mem_register (fp_node *node, void *start, size_t len, fp_mem *memory);
/* Frees or deregisters memory. Returns -EBUSY while an operation, a receive or an import uses it.
 * Returns -EADDRINUSE if the memory is freed but a provider still holds it. If so, never reuse
 * registered memory. */
int fp_mem_free (fp_node *node, fp_mem memory);
/* Copies out the handle with which peers import the memory. `*len` works as in fp_node_address. */
int fp_mem_export (fp_node *node, fp_mem memory, void *handle, size_t *len);
/* Imports memory of a peer. Waits at most connect_timeout_ms until the peer is connected and has
 * announced the memory. Returns -ENOTCONN if the peer did not connect, and -ETIMEDOUT if it did not
 * announce allocated memory, for example because it has freed it. */
int fp_mem_import (fp_node *node, fp_peer peer, const void *handle, size_t len, fp_remote *remote);
int fp_mem_release (fp_node *node, fp_remote remote);
/* Copy bytes into memory of this node, and out of it. */
int fp_mem_write (fp_node *node, fp_mem memory, uint64_t offset, const void *from, size_t len);
int fp_mem_read (fp_node *node, fp_mem memory, uint64_t offset, void *into, size_t len);
/* Stores a 64-bit word with release ordering, at an offset that is a multiple of 8. fp_wait_signal
 * loads such a word. */
int fp_mem_store (fp_node *node, fp_mem memory, uint64_t offset, uint64_t value);

/* ---- One-sided operations ---------------------------------------------------------------------
 * If there is no room for an operation, the call makes progress for up to patience_ms, and then
 * fails with -EAGAIN. If `token` is not null, fp_poll or fp_test reports the completion;
 * otherwise wait with fp_quiet. Do not change the operation's memory before its completion. */

#define FP_SIGNAL_SET 1
#define FP_SIGNAL_ADD 2

enum {
  FP_AMO_SET = 1, FP_AMO_ADD, FP_AMO_INC, FP_AMO_AND, FP_AMO_OR, FP_AMO_XOR,
  FP_AMO_SWAP, FP_AMO_COMPARE_SWAP, FP_AMO_FETCH
};
enum { FP_EQ = 1, FP_NE, FP_GE, FP_GT, FP_LE, FP_LT };

int fp_put (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
            uint64_t remote_offset, fp_token *token);
/* Puts bytes of the program. The bytes may be reused on return. */
int fp_put_bytes (fp_node *node, const void *from, size_t len, fp_remote remote,
                  uint64_t remote_offset);
/* Writes, then signals. The 64-bit signal word changes after the data and everything sent to the
 * peer earlier have landed. If `len` is 0, there is no data, and `memory` and `remote` are
 * ignored. */
int fp_put_signal (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
                   uint64_t remote_offset, fp_remote signal_remote, uint64_t signal_offset, int op,
                   uint64_t value, fp_token *token);
int fp_get (fp_node *node, fp_mem memory, uint64_t offset, size_t len, fp_remote remote,
            uint64_t remote_offset, fp_token *token);
/* `width` is 1, 2, 4 or 8 bytes. Only FP_AMO_COMPARE_SWAP uses `compare`. */
int fp_atomic (fp_node *node, fp_remote remote, uint64_t offset, int op, uint32_t width,
               uint64_t operand, uint64_t compare, fp_token *token);
int fp_atomic_fetch (fp_node *node, fp_remote remote, uint64_t offset, int op, uint32_t width,
                     uint64_t operand, uint64_t compare, uint64_t *before, int64_t timeout_ms);
/* Makes later writes to the peer land after everything sent earlier. Does not wait. */
int fp_fence (fp_node *node, fp_peer peer);
/* Waits until everything sent to the peer, or to all peers (FP_ANY), is applied there. */
int fp_quiet (fp_node *node, fp_peer peer, int64_t timeout_ms);
/* Waits until the requested comparison of the 64-bit word with `value` holds. `from` is the peer
 * that signals, or FP_ANY; the wait fails if that peer fails. `seen` receives the word, and may be
 * null. */
int fp_wait_signal (fp_node *node, fp_mem memory, uint64_t offset, int compare, uint64_t value,
                    fp_peer from, int64_t timeout_ms, uint64_t *seen);

/* ---- Tagged messages --------------------------------------------------------------------------
 * A receive matches a message if it names the sender or FP_ANY, and if the tags are equal in all
 * bits that are 0 in `ignore`. Messages of one sender match in the order sent. */

typedef struct fp_tag {
  uint64_t low;
  uint32_t high;
} fp_tag;

typedef struct fp_message {
  fp_tag tag;
  uint64_t len;   /* length at the sender, in bytes */
  uint64_t claim; /* set by fp_probe, for fp_recv_claimed */
  fp_peer source;
} fp_message;

/* Sends bytes of the program, which may be reused on return. Long messages are copied. The first
 * message to a peer of this host waits until fp_peer_state returns 1. Messages to other peers are
 * queued until they answer, as far as there is room. */
int fp_send (fp_node *node, fp_peer to, fp_tag tag, const void *from, size_t len);
int fp_send_mem (fp_node *node, fp_peer to, fp_tag tag, fp_mem memory, uint64_t offset, size_t len,
                 fp_token *token);
/* Waits for a message. If it is longer than the buffer, copies its first bytes, drops the rest, and
 * returns -EMSGSIZE. `message` may be null. */
int fp_recv (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, void *into, size_t len,
             int64_t timeout_ms, fp_message *message);
/* Posts a receive. fp_poll reports the completion, with `word`. */
int fp_post_recv (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, fp_mem memory,
                  uint64_t offset, size_t len, uint64_t word, fp_request *request);
/* Cancels a receive. Returns 1 if cancelled, 0 if it had already matched. The receive completes
 * in either case. */
int fp_cancel (fp_node *node, fp_request request);
/* Returns 1 if a matching message has arrived, else 0. With `claim`, the message is reserved for
 * fp_recv_claimed, and no other receive matches it. */
int fp_probe (fp_node *node, fp_peer source, fp_tag tag, fp_tag ignore, int claim,
              fp_message *message);
/* Posts a receive for a claimed message. The completion is reported as for fp_post_recv. */
int fp_recv_claimed (fp_node *node, uint64_t claim, fp_mem memory, uint64_t offset, size_t len,
                     uint64_t word, fp_request *request);

/* ---- Completions ----------------------------------------------------------------------------- */

#define FP_OPERATION 1u
#define FP_RECEIVE 2u

typedef struct fp_completion {
  uint32_t kind;  /* FP_OPERATION or FP_RECEIVE */
  int32_t status; /* 0, or a negative errno value: -EMSGSIZE if a receive's buffer was too short */
  uint64_t id;    /* the token, or the request */
  uint64_t word;  /* the `word` given to fp_post_recv */
  uint64_t value; /* send: bytes that the receiver took; receive: bytes written to the buffer */
  fp_message message; /* of a matched receive */
  uint32_t may_land;  /* 1: failed, but may still land: free the memory before you reuse it */
} fp_completion;

/* Makes one pass, and takes up to `count` completions. Returns their number. */
int fp_poll (fp_node *node, fp_completion *completions, size_t count);
/* Returns 1 if the operation is complete, and takes its completion; else returns 0. Makes no
 * progress. */
int fp_test (fp_node *node, fp_token token, fp_completion *completion);

/* Counters since the node was opened. Set struct_size before the call. */
typedef struct fp_stats_t {
  size_t struct_size;
  uint64_t posted, arrived, out_of_order, duplicates, stale, applied, acks_alone, refused, failed;
  uint64_t passes;
} fp_stats_t;

int fp_stats (fp_node *node, fp_stats_t *stats);

#ifdef __cplusplus
}
#endif

#endif
