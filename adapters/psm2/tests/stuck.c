/* Runs two processes. One of them can never continue. It must get an error, and must not hang.

     stuck dies          sends active messages to a process that is killed, until there is no room
     stuck crowds BYTES  waits for a message behind too many unexpected messages of BYTES bytes each
     stuck third BYTES   the same, but first waits for a third endpoint, which must not be an error
     stuck cycle BYTES   the same, but the third endpoint never sends

   Set FISHPLATE_PSM2_PATIENCE to a few seconds. */
#include <psm2.h>
#include <psm2_am.h>
#include <psm2_mq.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MUST(condition)                                                            \
  do                                                                               \
    if (!(condition))                                                              \
      {                                                                            \
        fprintf (stderr, "process %d, line %d: %s\n", me, __LINE__, #condition);   \
        _exit (2);                                                                 \
      }                                                                            \
  while (0)

static int me;
static volatile psm2_error_t told;

static psm2_error_t handler (psm2_ep_t ep, const psm2_error_t error, const char *text,
                             psm2_error_token_t token)
{
  (void) ep, (void) text, (void) token;
  told = error;
  return error;
}

static int ignore (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                   void *context)
{
  (void) token, (void) args, (void) nargs, (void) src, (void) len, (void) context;
  return 0;
}

static void late (int number)
{
  (void) number;
  static const char text[] = "still waiting after 60 seconds\n";
  if (write (2, text, sizeof text - 1))
    _exit (3);
}

/* Sends until a call fails, and checks that the error reports a failed peer. */
static void flood (psm2_epaddr_t to, int handler_index)
{
  psm2_amarg_t arg = { .u64 = 1 };
  psm2_error_t error = PSM2_OK;
  while (error == PSM2_OK)
    error = psm2_am_request_short (to, handler_index, &arg, 1, NULL, 0, PSM2_AM_FLAG_NOREPLY, NULL,
                                   NULL);
  MUST (error == PSM2_EPID_NETWORK_ERROR);
}

/* Waits for a message from a third endpoint, which sends it long after FISHPLATE_PSM2_PATIENCE has
 * passed, or never. */
static void wait_for_third (int never, psm2_ep_t ep, psm2_mq_t mq, psm2_uuid_t key,
                            struct psm2_ep_open_opts *opts, psm2_epid_t id)
{
  const char *patience = getenv ("FISHPLATE_PSM2_PATIENCE");
  psm2_mq_tag_t tag = { { 3, 0, 0, 0 } }, all = { { -1u, -1u, -1u, 0 } };
  psm2_epaddr_t from, to;
  psm2_mq_req_t req;
  psm2_epid_t other;
  psm2_error_t error;
  psm2_ep_t third;
  psm2_mq_t sends;
  MUST (patience && psm2_ep_open (key, opts, &third, &other) == PSM2_OK
        && psm2_mq_init (third, 0, NULL, 0, &sends) == PSM2_OK);
  MUST (psm2_ep_connect (ep, 1, &other, NULL, &error, &from, 20000000000) == PSM2_OK);
  MUST (psm2_ep_connect (third, 1, &id, NULL, &error, &to, 20000000000) == PSM2_OK);
  MUST (psm2_mq_irecv2 (mq, from, &tag, &all, 0, NULL, 0, NULL, &req) == PSM2_OK);
  for (time_t end = time (NULL) + 2 * atoi (patience) + 2; time (NULL) < end;)
    MUST (psm2_mq_ipeek2 (mq, &req, NULL) == PSM2_MQ_NO_COMPLETIONS);
  MUST (told == 0);
  if (never)
    {
      MUST (psm2_mq_wait2 (&req, NULL) != PSM2_OK && told == PSM2_NO_MEMORY);
      return;
    }
  MUST (psm2_mq_send2 (sends, to, 0, &tag, NULL, 0) == PSM2_OK);
  MUST (psm2_mq_wait2 (&req, NULL) == PSM2_OK);
}

int main (int argc, char **argv)
{
  int cycle = argc == 3 && !strcmp (argv[1], "cycle"),
      third = cycle || (argc == 3 && !strcmp (argv[1], "third")),
      dies = argc == 2 && !strcmp (argv[1], "dies"), bytes = argc == 3 ? atoi (argv[2]) : 0;
  int up[2], down[2], major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR, index;
  psm2_uuid_t key = { 25 };
  struct psm2_ep_open_opts opts;
  psm2_epid_t id, other;
  psm2_error_t error;
  psm2_ep_t ep;
  psm2_mq_t mq;
  psm2_epaddr_t to;
  psm2_am_handler_2_fn_t ignored = ignore;
  void *context = NULL;
  psm2_mq_tag_t many = { { 1, 0, 0, 0 } }, last = { { 2, 0, 0, 0 } },
                all = { { -1u, -1u, -1u, 0 } };
  psm2_mq_req_t req;
  psm2_mq_status2_t status;
  MUST (dies || bytes > 0);
  MUST (pipe (up) == 0 && pipe (down) == 0);
  pid_t child = fork ();
  me = child == 0;
  if (me)
    prctl (PR_SET_PDEATHSIG, SIGKILL);
  int out = me ? up[1] : down[1], in = me ? down[0] : up[0];
  MUST (psm2_error_register_handler (NULL, handler) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  MUST (psm2_ep_open (key, &opts, &ep, &id) == PSM2_OK
        && psm2_mq_init (ep, 0, NULL, 0, &mq) == PSM2_OK);
  if (dies)
    MUST (psm2_am_register_handlers_2 (ep, &ignored, 1, &context, &index) == PSM2_OK);
  MUST (write (out, &id, sizeof id) == sizeof id
        && read (in, &other, sizeof other) == sizeof other);
  MUST (psm2_ep_connect (ep, 1, &other, NULL, &error, &to, 20000000000) == PSM2_OK);
  MUST (write (out, &id, 1) == 1 && read (in, &error, 1) == 1);
  signal (SIGALRM, late);
  alarm (60);
  char *buffer = calloc (1, bytes + 1);
  if (dies && me)
    for (;;)
      pause ();
  if (dies)
    {
      /* Fills the room at the peer. The peer handles no messages. */
      for (int sent = 0; sent < 200; sent++)
        MUST (psm2_am_request_short (to, index, NULL, 0, NULL, 0, PSM2_AM_FLAG_NOREPLY, NULL, NULL)
              == PSM2_OK);
      kill (child, SIGKILL);
      flood (to, index);
      MUST (told == PSM2_EP_NO_NETWORK || told == 0);
    }
  else if (me)
    for (;;)
      psm2_mq_send2 (mq, to, 0, &many, buffer, bytes);
  else
    {
      if (third)
        wait_for_third (cycle, ep, mq, key, &opts, id);
      if (!cycle)
        {
          MUST (psm2_mq_irecv2 (mq, to, &last, &all, 0, buffer, bytes, NULL, &req) == PSM2_OK);
          MUST (psm2_mq_wait2 (&req, &status) != PSM2_OK && told == PSM2_NO_MEMORY);
        }
      kill (child, SIGKILL);
    }
  printf ("told of it\n");
  _exit (0);
}
